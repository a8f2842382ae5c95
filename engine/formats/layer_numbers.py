"""Which model layer each layer of a recording is, as far as the open model tells."""

from collections.abc import Sequence

from engine.formats.source import Source


def model_layers_of(source: Source, layers: int) -> tuple[int, ...] | None:
    """The model layer of each of `layers` recorded layers, that are all MoE layers or all decoder layers of the open model;
    None where there is no model, or one with other numbers of layers."""
    if source.model is None:
        return None
    if layers == len(source.model.moe_layers):
        return source.model.moe_layers
    return tuple(range(layers)) if layers == source.model.layers else None


def model_layers_named(source: Source, numbers: Sequence[int]) -> tuple[int, ...] | None:
    """The model layer of each recorded layer, of which the recording gives a number that counts MoE layers or decoder layers.

    None where there is no model, and where both ways of counting would fit.
    """
    if source.model is None:
        return None
    moe, decoder = source.model.moe_layers, set(source.model.moe_layers)
    if len(moe) == source.model.layers and decoder.issuperset(numbers):
        return tuple(numbers)
    of_moe_layers = all(0 <= number < len(moe) for number in numbers)
    of_decoder_layers = decoder.issuperset(numbers)
    if tuple(numbers) == moe or (of_decoder_layers and not of_moe_layers):
        return tuple(numbers)
    if (of_moe_layers and not of_decoder_layers) or len(numbers) == len(moe):
        return tuple(moe[number] for number in numbers)
    return None
