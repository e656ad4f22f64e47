"""A merge beside plain writes of as many bytes: what the card needs for those, and what the record says of it."""

from fakes import CEILINGS, STAMP, made_row

from harness import ceilings, record, show
from harness.record import Record
from kernels.registry import ops

LARGE, SMALL = "dit_mlp_in_f-1", "sdxl_attn_f8"


def test_every_delta_of_the_sweep_has_its_size():
    merges = [op for op in ops().values() if not op.name.endswith("_bypass")]
    sizes = {op.cost(case.dims, 2).bytes_written for op in merges for case in op.cases}
    assert sizes == set(ceilings.SHORT_WRITES)


def test_table(tmp_path):
    rows = [
        made_row("lokr", case.name, backend, [time + 1, time], dims=dict(case.dims))
        for case in ops()["lokr"].cases
        if case.name in (LARGE, SMALL)
        for backend, time in {"eager": 100.0, "triton": 20.0}.items()
    ]
    Record(STAMP | {"ceilings": CEILINGS}, rows).save(tmp_path / "lokr.json")
    writes = [
        {
            "kind": ceilings.SHORT_WRITE,
            "bytes": 12288 * 3072 * 2,
            "reason": reason,
            "dev_us": times,
            "implementation": arm,
        }
        for arm, times, reason in (("constant", [17.0, 16.5], None), ("loaded", [17.5], None), ("other", [1.0], "lost"))
    ]
    Record(dict(STAMP), [{"kind": "copy"}, *writes]).save(tmp_path / "ceilings.json")
    table = show.short_writes(record.load(tmp_path / "lokr.json"), "lokr")
    assert table.loc[LARGE].to_dict() == {
        "MB": 75.5,
        "at the ceiling": 23.59,
        "constant": 16.5,
        "loaded": 17.5,
        "eager": 100.0,
        "triton": 20.0,
    }
    assert table.loc[SMALL, ["constant", "loaded"]].isna().all()
