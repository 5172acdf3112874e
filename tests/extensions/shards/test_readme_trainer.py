"""The README's sharded trainer makes each step a version of two servers."""

from __future__ import annotations

from pathlib import Path

from harness.server import Server, serve
from harness.starting import ROOT, end, start
from tests.extensions.shards import readme_trainer
from tests.support.examples import TIMEOUT_S
from tests.support.load import status
from tests.support.updates import expect_served


def test_readmes_sharded_trainer_makes_each_step_a_version(
    server: Server, checkpoints: Path, tmp_path: Path
) -> None:
    """Two processes run the code of the block with `` ShardSender(fleet)``."""
    log = tmp_path / "trainer.log"
    folder = checkpoints / "v0"
    with (
        serve(folder, "--weight-version", "v0", log=tmp_path / "log") as second,
        log.open("wb") as sink,
    ):
        process = start(
            [
                *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
                *("-m", readme_trainer.__name__, server.url, second.url),
            ],
            output=sink,
            cwd=ROOT,
            forks_commands=True,
        )
        try:
            assert process.wait(TIMEOUT_S) == 0, log.read_text()
        finally:
            end(process)
        for each in (server, second):
            assert status(each)["weight_version"] == "44"
            expect_served(each, 2)
