"""The check of binaries for registers that are written while an asynchronous product reads them."""

from __future__ import annotations

import pytest

from tests.support.binaries import overwritten_operands

LOOP = """
.L_x_1:
        /*0010*/                   {before} ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0030*/                   IGMMA.64x256x32.S8.S8 R24, R164, gdesc[UR12], R24 ;
        /*0040*/                   IGMMA.64x256x32.S8.S8 R24, R160, gdesc[UR12], R24, gsb0 ;
        /*0050*/                   {between} ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{left} ;
        /*0070*/                   {after} ;
        /*0080*/              @P0 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(
    ("place", "written", "left", "wrong"),
    [
        ("between", "SEL R163, R1, R2, P2", 0, True),
        ("between", "LDS.128 R158, [R1]", 0, True),  # the last two of four registers
        ("between", "SEL R156, R1, R2, P2", 0, False),
        ("between", "STS.128 [R9], R160", 0, False),
        ("after", "SEL R163, R1, R2, P2", 0, False),
        ("after", "SEL R163, R1, R2, P2", 1, True),
        ("before", "SEL R164, R1, R2, P2", 1, True),  # of the loop's last turn
        ("before", "SEL R164, R1, R2, P2", 0, False),
    ],
)
def test_operands_in_flight_are_not_written(place: str, written: str, left: int, wrong: bool) -> None:
    lines = {"before": "NOP", "between": "NOP", "after": "NOP"} | {place: written}
    assert overwritten_operands(LOOP.format(left=left, **lines)) == ({written} if wrong else set())


def test_code_without_a_loop_has_none() -> None:
    assert overwritten_operands("        /*0010*/                   NOP ;\n") == set()
