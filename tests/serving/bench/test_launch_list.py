"""Names of launches, and those of one layer, from the text of a program written by hand."""

import pytest

from serving.bench.launch_list import Launch, layer_launches, named_launches

TABLES = """
FileNames
1 "/home/me/shiftjax/models/llama.py"
2 "/home/me/shiftjax/models/products.py"
3 "/home/me/shiftjax/models/layers.py"

FunctionNames
1 "Attention.__call__"
2 "Attention._output"
3 "project_in"
4 "_product.<locals>.multiply"
5 "rms_norm"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=1}
2 {file_name_id=1 function_name_id=2 line=8 end_line=8 column=1 end_column=1}
3 {file_name_id=2 function_name_id=3 line=7 end_line=7 column=1 end_column=1}
4 {file_name_id=2 function_name_id=4 line=6 end_line=6 column=1 end_column=1}
5 {file_name_id=3 function_name_id=5 line=5 end_line=5 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=5 parent_frame_id=1}

"""
TEXT = f"""HloModule jit_step
{TABLES}
%normed (p: bf16[8,64], w: bf16[64]) -> bf16[8,64] {{
  %p = bf16[8,64]{{1,0}} parameter(0)
  %b = bf16[8,64]{{1,0}} broadcast(%p), metadata={{op_name="w" stack_frame_id=3}}
  %m = bf16[8,64]{{1,0}} multiply(%p, %b), metadata={{op_name="m" stack_frame_id=5}}
  ROOT %a = bf16[8,64]{{1,0}} add(%m, %b), metadata={{op_name="a" stack_frame_id=1}}
}}

%multiplied (q: bf16[8,64], w: bf16[64,64]) -> bf16[8,64] {{
  %q = bf16[8,64]{{1,0}} parameter(0)
  %v = bf16[64,64]{{1,0}} parameter(1)
  ROOT %d = bf16[8,64]{{1,0}} dot(%q, %v), metadata={{op_name="d" stack_frame_id=4}}
}}

ENTRY %main (x: bf16[8,64], v: bf16[64,64]) -> bf16[8,64] {{
  %x = bf16[8,64]{{1,0}} parameter(0)
  %v.1 = bf16[64,64]{{1,0}} parameter(1)
  %n = bf16[8,64]{{1,0}} fusion(%x, %v.1), kind=kLoop, calls=%normed
  %k = bf16[8,64]{{1,0}} custom-call(%n), custom_call_target="mosaic_gpu_v2", \
metadata={{op_name="jit(step)/decode_attention/mpmd_map" stack_frame_id=1}}
  %g = bf16[8,64]{{1,0}} fusion(%k, %v.1), kind=kCustom, calls=%multiplied
  %h = bf16[8,64]{{1,0}} custom-call(%g), custom_call_target="mosaic_gpu_v2", \
metadata={{op_name="jit(step)/block_product_few/mpmd_map" stack_frame_id=3}}
  ROOT %s = bf16[8,64]{{1,0}} all-reduce(%h), replica_groups={{{{0,1}}}}
}}
"""
ADD, QKV, TURN = Launch("other", "add"), Launch("product", "qkv"), Launch("other", "turn")
DECODE, OUT = Launch("kernel", "decode_attention"), Launch("product", "out")
MORE, FIRST, LAST = Launch("other", "more"), Launch("other", "first"), Launch("other", "last")
LAYER = [ADD, QKV, TURN, DECODE, OUT]


def test_a_launch_has_the_names_of_the_functions_whose_work_it_does():
    assert named_launches(TEXT) == [
        Launch("other", "rms_norm + Attention"),
        Launch("kernel", "decode_attention"),
        Launch("product", "product of Attention.output"),
        Launch("product", "block_product_few of Attention.output"),
        Launch("collective", "all-reduce, nccl"),
    ]


def test_without_sources_a_launch_has_the_name_of_what_it_does():
    bare = TEXT.replace(TABLES, "")
    names = [one.name for one in named_launches(bare)]
    assert names == [
        "fusion",
        "decode_attention",
        "product of d",
        "block_product_few of h",
        names[-1],
    ]


@pytest.mark.parametrize("beside", [[], [ADD]], ids=["as the others", "without the first add"])
def test_a_layer_is_what_a_deeper_program_has_more(beside):
    """From its begin, wherever the first layer differs from the others."""
    first = [one for one in LAYER if one not in beside]
    few, many = ([FIRST, *first, *LAYER * more, LAST] for more in (1, 3))
    assert layer_launches(few, many) == LAYER


def test_layers_that_differ_in_turn_are_two():
    odd = [*LAYER, MORE]
    few, many = ([FIRST, *(LAYER + odd) * pairs, LAST] for pairs in (1, 2))
    assert layer_launches(few, many) == [MORE, *LAYER, *LAYER]


def test_what_a_fusion_lost_is_a_launch_more():
    few, many = ([FIRST, *[*LAYER[:3], MORE, *LAYER[3:]] * layers, LAST] for layers in (2, 4))
    assert layer_launches(few, many) == [*LAYER[:3], MORE, *LAYER[3:]]


@pytest.mark.parametrize("layers", [1, 2])
def test_where_the_order_differs_names_and_numbers_are_left(layers):
    """Something is done once, at another place in each program."""
    few, many = ([ADD, MORE, QKV, LAST, ADD, QKV], [ADD, QKV, MORE, LAST, ADD, QKV])
    many = [*many, ADD, QKV, *[ADD, QKV, QKV] * (layers - 1)]
    expected = {1: [ADD, QKV], 2: [ADD, ADD, QKV, QKV, QKV]}[layers]
    assert layer_launches(few, many) == expected
    assert layer_launches(few, [*many[:6], *[ADD, QKV] * 2]) == [ADD, QKV]
