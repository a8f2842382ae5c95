"""SGLang's records of its experts: statistics, passes and tokens of its recorder, and the choices of single requests."""

from engine.formats.format import Format
from engine.formats.sglang import counts_csv, dumps, responses, statistics, tokens

FORMATS: tuple[Format, ...] = (*statistics.FORMATS, *tokens.FORMATS, *dumps.FORMATS, *counts_csv.FORMATS, *responses.FORMATS)
