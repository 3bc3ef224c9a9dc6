"""An adapter for an engine that Penstock has never seen: weights at start, and updates from a trainer.

docs/extend/spi.md explains it. The engine is invented, and its code is at the end.
Run it on any machine: python engine_adapter.py
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import penstock
from penstock import spi

# ---- the adapter: a separate package, which the engine finds through an entry point

LOAD, UPDATES = "load format penstock", "updates from a trainer"
PLUGIN = spi.HostPlugin("made-up-engine", tested=("1.0", "1.4"), log=lambda: spi.log_named("penstock.made_up"))


def register():
    """Register Penstock with the engine. It never raises. A part that this version of the engine lacks is off."""
    PLUGIN.register({LOAD: add_load_format, UPDATES: add_updates})


def add_load_format():
    Engine.LOADERS["penstock"] = Loader


def add_updates():
    spi.patch_once(Engine, handle=handle)


def handle(original, engine, command, *arguments):
    """Handle the command `receive`, which the engine does not know."""
    if command != "receive":
        return original(engine, command, *arguments)
    # Receive and verify the whole version before the engine changes.
    tensors = engine.loader.receive(*arguments)
    engine.load(tensors.items())
    return engine.loader.receiver.report


class Loader:
    """Reads a checkpoint from a cache, a fleet or storage. Then it receives a trainer's versions."""

    def __init__(self, options):
        options = dict(options)
        self.sync = options.pop("sync", None)
        if self.sync is not None:
            # The user asks for this part, so an error is right if it is off.
            PLUGIN.require(UPDATES, feature='the option "sync"')
        self.options = spi.read_options(options)
        self.receiver = None

    def tensors(self, path):
        rank = spi.RankInfo(rank=lambda: 0, device=lambda: "cpu", group=lambda: None)
        log = spi.log_named("penstock.made_up")
        return spi.checkpoint(path, None, self.options, rank, model=path, log=log, progress=False)

    def receive(self, version, timeout_s=60.0):
        # Join at the first update. The engine starts from storage without a hub, but a sync needs one.
        if self.receiver is None:
            # The fleet's member took the given ports, so this member takes free ones.
            self.receiver = spi.VersionReceiver(self.sync, connection=spi.connection_of(self.options, rank=1))
        return self.receiver.receive(version, timeout_s)

    def close(self):
        if self.receiver is not None:
            self.receiver.close()


# ---- the engine: it fuses the checkpoint's tensors, as engines do


class Engine:
    LOADERS = {}  # noqa: RUF012 - the engine is invented

    def __init__(self, path, load_format, options):
        self.qk = torch.zeros(8, 4)
        self.loader = self.LOADERS[load_format](options)
        self.load(self.loader.tensors(path))

    def load(self, tensors):
        """Copy each tensor into its rows. The tensors themselves belong to the loader."""
        for name, tensor in tensors:
            self.qk[0 if name == "q" else 4 :][:4].copy_(tensor)

    def handle(self, command, *arguments):
        raise ValueError(f"unknown command {command}")


def main():
    register()
    weights = {"q": torch.arange(16.0).view(4, 4), "k": torch.ones(4, 4)}
    with tempfile.TemporaryDirectory() as directory:
        save_file(weights, Path(directory) / "model.safetensors")
        penstock.manifest(directory)
        # The first replica reads storage and serves the fleet. The second one reads from the first.
        engines = [Engine(directory, "penstock", {"fleet": "made-up", "sync": "policy"}) for _ in range(2)]
    assert all(torch.equal(engine.qk, torch.cat([weights["q"], weights["k"]])) for engine in engines)

    trained = {name: tensor + 1 for name, tensor in weights.items()}
    with penstock.publisher("policy", trained) as publisher:
        version = publisher.publish(1).version
        for engine in engines:
            print(engine.handle("receive", version))
            assert torch.equal(engine.qk, torch.cat([trained["q"], trained["k"]]))
            engine.loader.close()


if __name__ == "__main__":
    main()
