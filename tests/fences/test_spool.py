import os

from fa_verify.spool import Argument, Launch, Running, Spool, read

LAUNCH = Launch(
    kernel="f",
    file="f.py",
    line=3,
    arguments=(Argument(name="x", label="q", shape=(2, 3), strides=(3, 1), offset=0, itemsize=2),),
)


def test_what_a_process_is_at_is_on_disk_before_it_goes_on(tmp_path):
    spool = Spool(tmp_path)
    spool.begin(target="f.py:f", case="pass=fwd", setup="backend=cuda")
    assert read(tmp_path, os.getpid()).case == "pass=fwd"
    spool.launch(LAUNCH, "page", alone=True)
    assert read(tmp_path, os.getpid()).launch == LAUNCH
    spool.fault("illegal")
    last = read(tmp_path, os.getpid())
    assert (last.error, last.launch, last.target) == ("illegal", LAUNCH, "f.py:f")
    spool.begin(target="g", case="", setup="")
    assert read(tmp_path, os.getpid()) == Running(target="g")


def test_a_process_that_never_wrote_or_was_torn_says_nothing(tmp_path):
    assert read(tmp_path, 1) == read(tmp_path, None) == Running()
    (tmp_path / "1.json").write_text('{"target": "f')
    assert read(tmp_path, 1) == Running()


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Spool(None).launch(LAUNCH, "off", alone=False)
    assert list(tmp_path.iterdir()) == []
