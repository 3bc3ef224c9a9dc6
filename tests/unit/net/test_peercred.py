"""Credentials of the peer of a Unix socket."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from tests.support.users import STRANGER, run_as

from penstock.net.unix_sockets import connect_unix, is_same_user, peer_credentials, peer_uid

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def test_socket_pair_reports_own_process_as_peer() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert peer_credentials(near) == (os.getpid(), os.geteuid())
        assert peer_uid(far) == os.geteuid() and is_same_user(far)


@AS_ROOT
def test_connection_from_another_user_is_detected() -> None:
    name = f"\0penstock-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(1)

        def connect() -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(name)

        run_as(STRANGER, connect)
        accepted, _ = listener.accept()
        with accepted:
            assert peer_uid(accepted) == STRANGER and not is_same_user(accepted)


@AS_ROOT
def test_connecting_to_listener_of_another_user_raises() -> None:
    name = f"\0penstock-test-{os.getpid()}-theirs"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def listen_and_connect() -> str:
        # Credentials are those of the process that called listen. Connect as root afterwards.
        listener.bind(name)
        listener.listen(1)
        return "listening"

    with listener:
        assert run_as(STRANGER, listen_and_connect) == "listening"
        with pytest.raises(PermissionError, match=f"user {STRANGER} listens"):
            connect_unix(name, 5.0)


def test_connect_waits_for_full_backlog(tmp_path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(0)
        with connect_unix(path, 5.0):
            with pytest.raises(TimeoutError, match="full"):
                connect_unix(path, 0.05)

            def accept_one() -> None:
                listener.accept()[0].close()

            thread = threading.Thread(target=accept_one)
            thread.start()
            connect_unix(path, 10.0).close()
            thread.join()
