"""Megatron-Core's router traces: `records` reads the files of ranks and finds the layers that their numbers mean, `trace` puts
the tokens together."""

from engine.formats.megatron.trace import FORMATS
