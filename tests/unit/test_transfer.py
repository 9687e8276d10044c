"""How rsync is told to reach a host."""

import pytest

from pivot import transfer

HOST = {
    "inventory_hostname": "infer1", "ansible_connection": "ssh", "ansible_host": "10.0.0.2", "ansible_user": "root",
    "ansible_port": 2222, "ansible_ssh_private_key_file": "/keys/a key",
    "ansible_ssh_common_args": "-o UserKnownHostsFile=/known", "ansible_ssh_extra_args": "",
}  # fmt: skip


def test_every_variable_of_the_connection_counts():
    assert transfer.rsync_to("/from", "/to/", HOST, ["--times"]) == [
        "rsync", "--times", "--protect-args", "--rsh",
        "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -p 2222 -i '/keys/a key' -o UserKnownHostsFile=/known",
        "/from/", "root@10.0.0.2:/to/",
    ]  # fmt: skip


def test_unset_variables_are_left_out():
    call = transfer.rsync_to(
        "/from", "/to", {"inventory_hostname": "infer1", "ansible_host": "", "ansible_user": ""}, []
    )
    assert call[-1] == "infer1:/to/"
    assert "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes" in call


def test_an_ipv6_address_is_put_into_brackets():
    assert transfer.rsync_to("/f", "/t", HOST | {"ansible_host": "fd00::2"}, [])[-1] == "root@[fd00::2]:/t/"


def test_a_local_connection_needs_no_shell():
    call = transfer.rsync_to("/f", "/t", {"inventory_hostname": "h", "ansible_connection": "local"}, [])
    assert call == ["rsync", "--protect-args", "/f/", "/t/"]


def test_an_apostrophe_that_rsync_cannot_pass_on_is_refused():
    with pytest.raises(transfer.TransferError, match="holds an apostrophe"):
        transfer.remote_shell(HOST | {"ansible_ssh_private_key_file": "/keys/it's"})


def test_the_other_name_of_the_key_counts_too():
    assert "-i /keys/k" in transfer.remote_shell({"inventory_hostname": "h", "ansible_private_key_file": "/keys/k"})
