"""Weights of experts in a byte or half a byte each: formats by name, and their conversion in torch.

A quantised weight (e, in, out) is `data` and `scale`, stored as stored.py describes; its scales are float32:

    name        data                       scale
    int8        int8 (e, in, out)          (e, 1, out): one per column
    fp8         float8_e4m3fn, same        (e, 1, out)
    fp8-tensor  float8_e4m3fn              (e, 1, 1): one per expert
    fp8-block   float8_e4m3fn              (e, ceil(in / 128), ceil(out / 128)): one per block of 128 x 128
    int4        uint8, two numbers a byte  (e, ceil(in / 128), out): one per 128 rows of a column
    int4-g64, int4-g32                     the same with 64 and 32 rows

There is no zero point. A scale makes the largest value of its block the largest number of the format; with four bits
7.5, half a step from 7 as -7.5 is from -8: the least step that leaves no error above its half. Where all is zero, or
too small for a scale that is a normal float32, the scale is 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .stored import ALL, Stored, stored_as

FORMATS = {
    "int8": Stored("int8", ALL, 1),
    "fp8": Stored("fp8", ALL, 1),
    "fp8-tensor": Stored("fp8", ALL, ALL),
    "fp8-block": Stored("fp8", 128, 128),
    "int4": Stored("int4", 128, 1),
    "int4-g64": Stored("int4", 64, 1),
    "int4-g32": Stored("int4", 32, 1),
}
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}  # of data
LARGEST = {"int8": 127, "fp8": 448, "int4": 7.5}  # what the largest value of a block becomes
RANGE = {"int8": (-127, 127), "fp8": (-448, 448), "int4": (-8, 7)}
IN_CACHE = 256  # rows of a weight that are converted together on CPU: a float32 copy of them fits a core's cache


def quantize(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """(e, in, out) -> data and scale. An expert at a time, so that little more than the result is held."""
    if format not in FORMATS:
        raise ValueError(f'quantize: format must be one of {", ".join(FORMATS)}; got "{format}".')
    if weight.dim() != 3 or not weight.is_floating_point():
        got = f"{str(weight.dtype).removeprefix('torch.')} {tuple(weight.shape)}"
        raise ValueError(f"quantize: weight must be a float tensor (e, in, out); got {got}.")
    (experts, rows, columns), stored = weight.shape, FORMATS[format]
    data = weight.new_empty((experts, stored.data_rows(rows), columns), dtype=DTYPES[stored.kind])
    scale = weight.new_ones((experts, *stored.scale_shape(rows, columns)), dtype=torch.float32)
    for expert in range(experts if weight.numel() else 0):
        scale[expert] = _fill_with_numbers(data[expert], weight[expert].detach(), stored)
        if not scale[expert].isfinite().all():
            raise ValueError(f"quantize: weight must be finite; expert {expert} holds NaN or infinity.")
    return data, scale


def dequantize(data: Tensor, scale: Tensor, rows: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight (e, rows, out). Only four-bit data of an odd number of rows needs to be told that number."""
    if rows is None:
        rows = data.shape[1] * (2 if data.dtype == torch.uint8 else 1)
    stored = how_stored(data, scale, rows)
    weight = torch.empty(data.shape[0], rows, data.shape[2], dtype=dtype, device=data.device)
    for expert in range(data.shape[0]):
        fill_with_weight(weight[expert], data[expert], scale[expert], stored)
    return weight


def how_stored(data: Tensor, scale: Tensor, rows: int) -> Stored:
    return stored_as(str(data.dtype).removeprefix("torch."), scale.shape, rows, data.shape[2])


def fill_with_weight(out: Tensor, data: Tensor, scale: Tensor | None, stored: Stored) -> None:
    """One expert's weight (in, out) in any dtype; without a scale its bare numbers, which every float dtype holds."""
    wide = out.dtype if scale is None else torch.promote_types(out.dtype, torch.float32)
    whole = out if wide == out.dtype else None
    for rows, part in parts_of_weight(data, scale, stored, out.shape[0], wide, whole):
        if whole is None:
            out[rows].copy_(part)


def parts_of_weight(
    data: Tensor,
    scale: Tensor | None,
    stored: Stored,
    rows: int,
    dtype: torch.dtype,
    whole: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """The same a few rows at a time: parts of `whole`, or else one buffer, which the next part overwrites."""
    step = IN_CACHE if data.device.type == "cpu" else max(rows, 1)
    group = stored.rows or rows
    rows_of_data = 2 if stored.kind == "int4" else 1  # in a byte
    buffer = data.new_empty((min(step, rows), data.shape[1]), dtype=dtype) if whole is None else whole
    if scale is not None and stored.columns > 1:
        scale = scale.repeat_interleave(stored.columns, dim=1)[:, : data.shape[1]]
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        part = buffer[: stop - start] if whole is None else whole[start:stop]
        _fill_with_bare(part, data[start // rows_of_data : -(-stop // rows_of_data)])
        if scale is not None:
            _multiply(part, scale[start // group : -(-stop // group)], min(group, step))
        yield slice(start, stop), part


def _fill_with_bare(out: Tensor, data: Tensor) -> None:
    if data.dtype == torch.uint8:
        signed = data.view(torch.int8)
        out[0::2].copy_((signed << 4) >> 4)
        out[1::2].copy_(signed[: out.shape[0] // 2] >> 4)
    elif data.dtype == DTYPES["fp8"] and out.dtype in _PLACES and _can_move_bits(data):
        integer, places, mask = _PLACES[out.dtype]
        out.view(integer).copy_(data.view(torch.int8)).bitwise_left_shift_(places).bitwise_and_(mask)
        out.mul_(2.0**120)
    else:
        out.copy_(data)


def _multiply(numbers: Tensor, scale: Tensor, group: int) -> None:
    """Numbers (rows, out), in place, times scale (a, 1 or out), each for `group` rows."""
    if scale.shape[0] * group == numbers.shape[0]:
        numbers.unflatten(0, (-1, group)).mul_(scale.unsqueeze(1))
        return
    for number, row in enumerate(scale):
        numbers[number * group : (number + 1) * group].mul_(row)


# torch converts float8 one by one: 20 ms for 3 million. Its seven bits moved to where a wider dtype has them, with the
# sign on top (a cast from int8 brings it there), are the same number with an exponent 120 smaller: 1 ms.
_PLACES = {torch.bfloat16: (torch.int16, 4, -0x7810), torch.float32: (torch.int32, 20, -0x78100000)}


def _can_move_bits(data: Tensor) -> bool:
    """Not with a NaN in it, which would become 480."""
    if data.device.type != "cpu" or not data.numel():
        return False
    return bool(data.view(torch.int8).bitwise_and(127).amax() != 127)


def pack(numbers: Tensor) -> Tensor:
    """int8 (rows, out) from -8 to 7 -> uint8 (ceil(rows / 2), out)."""
    pairs = F.pad(numbers, (0, 0, 0, numbers.shape[0] % 2)).view(torch.uint8).unflatten(0, (-1, 2))
    return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)


def _fill_with_numbers(data: Tensor, weight: Tensor, stored: Stored) -> Tensor:
    """Writes into data what stands for weight (in, out); returns the scale (a, b), not finite if weight is not."""
    largest, columns = LARGEST[stored.kind], stored.columns or weight.shape[1]
    scales, parts = [], []
    for block in weight.split(stored.rows or weight.shape[0]):
        tops = block.abs().amax(dim=0).float()  # (out,)
        tops = F.pad(tops, (0, -len(tops) % columns)).unflatten(0, (-1, columns)).amax(dim=1)
        scale = tops / largest
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
        spread = scale.repeat_interleave(columns)[: weight.shape[1]] if columns > 1 else scale
        numbers = block / spread
        numbers = numbers if stored.kind == "fp8" else numbers.round_()
        parts.append(numbers.clamp_(*RANGE[stored.kind]).to(DTYPES["fp8"] if stored.kind == "fp8" else torch.int8))
        scales.append(scale)
    numbers = torch.cat(parts)
    data.copy_(pack(numbers) if stored.kind == "int4" else numbers)
    return torch.stack(scales)
