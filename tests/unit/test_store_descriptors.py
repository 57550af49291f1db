"""etcd3 beside today's protobuf."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dejavu.errors import Fatal
from dejavu.store.descriptors import build_modules, import_etcd3, installed_folder, serialized_descriptor


def test_etcd3_imports_beside_the_installed_protobuf_and_only_once() -> None:
    etcd3 = import_etcd3()
    assert etcd3.__name__ == "etcd3"
    assert import_etcd3() is etcd3


def test_etcd3_messages_survive_serialization() -> None:
    rpc = import_etcd3().etcdrpc
    put = rpc.PutRequest(key=b"k", value=b"\x00\xff", lease=7)
    request = rpc.TxnRequest(success=[rpc.RequestOp(request_put=put)])
    assert rpc.TxnRequest.FromString(request.SerializeToString()).success[0].request_put == put


def test_etcd3_enums_have_their_values_at_every_level() -> None:
    rpc = import_etcd3().etcdrpc
    assert rpc.NOSPACE == rpc.AlarmType.Value("NOSPACE") == 1
    assert rpc.Compare.CompareTarget.Value("MOD") == rpc.Compare.MOD


def test_etcd3_descriptors_leave_the_shared_pool_alone() -> None:
    code = (
        "from dejavu.store.descriptors import import_etcd3; import_etcd3()\n"
        "from google.protobuf import descriptor_pool, descriptor_pb2\n"
        "file = descriptor_pb2.FileDescriptorProto(name='rpc.proto', package='somebody.elses')\n"
        "file.message_type.add(name='ResponseHeader')\n"
        "descriptor_pool.Default().AddSerializedFile(file.SerializeToString())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_generated_module_without_descriptor_is_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "etcdrpc"
    shutil.copytree(installed_folder(), folder)
    (folder / "auth_pb2.py").write_text("# newer generators embed it in another way\n")
    with pytest.raises(Fatal, match=r"auth_pb2\.py does not fit.*etcd3==0\.12\.0"):
        build_modules(folder)


def test_damaged_descriptor_is_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "etcdrpc"
    shutil.copytree(installed_folder(), folder)
    (folder / "kv_pb2.py").write_text("  serialized_pb=_b('\\n\\x08kv.pro')\n")
    with pytest.raises(Fatal, match=r"kv_pb2\.py does not fit"):
        build_modules(folder)


def test_missing_generated_module_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"kv_pb2\.py does not fit"):
        build_modules(tmp_path)


def test_serialized_descriptor_of_other_kinds_of_literals_is_refused() -> None:
    with pytest.raises(ValueError, match="int"):
        serialized_descriptor("  serialized_pb=_b(5)\n")
