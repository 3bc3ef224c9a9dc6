# Written by scripts/stubs.py.
from penstock.sync.check import StagedVersion as StagedVersion
from penstock.sync.publish.publisher import Publisher as Publisher
from penstock.sync.receive.released import StoredVersion as StoredVersion
from penstock.sync.receive.subscriber import Subscriber as Subscriber
from penstock.sync.settings import PublisherSettings as PublisherSettings
from penstock.sync.settings import SubscriberSettings as SubscriberSettings
__all__: list[str] = [
    "Publisher",
    "PublisherSettings",
    "StagedVersion",
    "StoredVersion",
    "Subscriber",
    "SubscriberSettings",
]
