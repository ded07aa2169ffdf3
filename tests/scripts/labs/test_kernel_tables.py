"""Published tables of measured kernels become rows that the simulator reads."""

import pytest

from scripts.labs import kernel_tables
from shiftjax.sim.measured_kernels import read_kernels

pytestmark = pytest.mark.thorough


def test_published_tables_become_rows(tmp_path, capsys):
    gemm = "gemm_dtype,m,n,k,latency\nfp8,64,8192,4096,0.02\nfp8,65,8192,4096,0.02\nint8,64,1,1,1\n"
    (tmp_path / "gemm_perf.txt").write_text(gemm)
    header = "batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype,step,"
    row = "64,1,32,8,128,bfloat16,fp8,1023,generation_attention,0.05\n"
    attention = f"{header}op_name,latency\n{row}"
    (tmp_path / "generation_attention_perf.txt").write_text(attention)
    nccl = "nccl_dtype,num_gpus,message_size,op_name,latency\nhalf,8,1024,reduce_scatter,0.01\n"
    (tmp_path / "nccl_perf.txt").write_text(nccl)
    (tmp_path / "other.txt").write_text("nothing\n")
    assert kernel_tables.main([str(tmp_path)]) == 0
    path = tmp_path / "rows.csv"
    path.write_text(capsys.readouterr().out)
    decode, product, scatter = sorted(read_kernels(path), key=lambda row: row.kernel)
    assert product.sizes | {"rows": 64, "inner": 4096, "columns": 8192, "quantises": 1} == (
        product.sizes
    )
    assert (decode.format, decode.sizes["context"], decode.sizes["launches"]) == ("fp8", 1024, 3)
    assert decode.seconds == pytest.approx(5e-5)
    assert (scatter.kernel, scatter.sizes["bytes"]) == ("reduce-scatter", 256)
