"""The contract on services that others wrote: Azurite for `az://`, fake-gcs-server for `gs://`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deltasync import open_store
from deltasync.errors import StoreError
from deltasync.stores import Store
from tests.contract.store_contract import DecidingSharedContract, RefusingContract, StoreContract
from tests.servers import clouds
from tests.servers.clouds import Service


class TestAzurite(StoreContract, DecidingSharedContract, RefusingContract):
    service: Service

    @pytest.fixture
    def store(self, azurite: Service, monkeypatch: pytest.MonkeyPatch) -> Store:
        self.service = azurite
        return open_store(clouds.channel_url(azurite, monkeypatch))

    @pytest.fixture
    def elsewhere(self, store: Store) -> tuple[str, Mapping[str, str]]:
        return store.url, self.service.env

    @pytest.fixture
    def refused(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
        return open_store(store.url)

    def test_a_container_that_is_not_there_is_named(self, store: Store) -> None:
        with pytest.raises(StoreError, match=r"az://nowhere/run/a: there is no such bucket"):
            open_store("az://nowhere/run").read("a", 1)


@pytest.mark.slow
class TestFakeGcs(StoreContract, DecidingSharedContract):
    service: Service

    @pytest.fixture
    def store(self, fake_gcs: Service, monkeypatch: pytest.MonkeyPatch) -> Store:
        self.service = fake_gcs
        return open_store(clouds.channel_url(fake_gcs, monkeypatch))

    @pytest.fixture
    def elsewhere(self, store: Store) -> tuple[str, Mapping[str, str]]:
        return store.url, self.service.env
