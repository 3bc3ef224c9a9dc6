"""Rounds with one process that reads HTTP or S3 storage that is slow, cut, busy, silent, wrong or changing.

Violations are wrong bytes, an error although bytes kept arriving, a hang, and leaks. `fleets` has fleets, and
`tests/integration/load/test_http_faults.py` tests each fault separately.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

from tests.chaos.fleets import LIES, TRANSIENT, storage_faults
from tests.chaos.harness import STALL_S, Round
from tests.support.servers.http_server import Faults, RangeServer

MAX_FAULTS = 4
"""Maximum number of consecutive faults. Five attempts without a byte are the default, and all may meet the same
range."""
ENDLESS = {
    "silent": Faults(stall_after=0),
    "silent before the head": Faults(stall_after=-1),
    "refused": Faults(status=403),
    "gone": Faults(status=500),
}
"""Faults that do not end. They must raise a typed error within the stall deadline and leak nothing."""


class StorageRound(Round):
    """Load, stream or load into, first through faults that end and then through faults that do not."""

    kind = "storage"
    at_once = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rng = self.rng
        self.how = rng.choice(["load", "stream", "load_into"])
        self.by_s3 = rng.random() < 0.4
        self.name = rng.choice(["plain", "sealed", "many"])
        self.checkpoint = self.world.checkpoints[self.name]
        self.trouble = [rng.choice([*TRANSIENT, *LIES, "changed"]) for _ in range(rng.choice([1, 2]))]
        if rng.random() < 0.4:
            self.trouble.append(rng.choice(list(ENDLESS)))

    def __str__(self) -> str:
        return f"{self.how} by {'S3' if self.by_s3 else 'HTTP'}: {', then '.join(self.trouble)}"

    def run(self) -> None:
        place = self.directory / "storage"
        shutil.copytree(self.checkpoint.directory, place / "bucket")
        with RangeServer(place) as server:
            uri = f"{server.url}/bucket/model.safetensors.index.json"
            options: dict[str, str] = {}
            if self.by_s3:
                uri = "s3://bucket/model.safetensors.index.json"
                keys = {"access_key_id": "chaos", "secret_access_key": "chaos", "region": "us-east-1"}
                options = {"endpoint": server.url, **keys}
            told = {
                "uri": uri,
                "how": self.how,
                "storage_options": options,
                "tensors": self.checkpoint.tensors,
            }
            loader = self.start("load", told)
            loader.send("first")
            self.check_outcome("nothing", self.expect(loader, "loaded"))
            for what in self.trouble:
                self.fault(f"storage: {what}")
                if what == "changed":
                    loader.events.pop("loaded", None)
                    server.faults = Faults(slow_bytes_per_s=8_000_000)
                    loader.send("load")
                    time.sleep(self.rng.random())
                    victim = self.rng.choice(sorted((place / "bucket").glob("*.safetensors")))
                    data = bytearray(victim.read_bytes())
                    data[-4096:] = os.urandom(4096)
                    new = victim.with_suffix(".new")
                    new.write_bytes(data)
                    new.replace(victim)
                    said = self.expect(loader, "loaded")
                    shutil.copytree(self.checkpoint.directory, place / "bucket", dirs_exist_ok=True)
                else:
                    server.faults = ENDLESS.get(what) or storage_faults(what, self.rng.randint(1, MAX_FAULTS))
                    loader.events.pop("loaded", None)
                    loader.send("load")
                    said = self.expect(loader, "loaded")
                self.check_outcome(what, said)
            server.faults = Faults()
            self.leave([loader])

    def check_outcome(self, what: str, said: dict[str, Any]) -> None:
        if "untold" in said:
            self.violate("wrong bytes", f"{what}: {said['untold']}")
        elif "error" in said:
            if what in {*TRANSIENT, "nothing"}:
                self.violate("unexpected error", f"{what}: {said['error']}: {said['message']}")
            if said["seconds"] > 2 * STALL_S + 10:
                self.violate("bounded waits", f"{what}: the error took {said['seconds']:.1f} s")
        elif said["digests"] != self.checkpoint.digests:
            self.violate("wrong bytes", f"{what}: loaded {said['digests'][:12]}")
        elif what in ENDLESS:
            self.violate("wrong bytes", f"{what}: loaded although storage sends nothing")
