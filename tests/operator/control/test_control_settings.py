import pytest

from busload_operator.control.settings import Settings, SettingsError

IMAGE = {"BUSLOAD_RUNTIME_IMAGE": "r:1"}


def test_defaults() -> None:
    settings = Settings.from_environment({**IMAGE, "BUSLOAD_SCRAPE_SECONDS": "", "HOME": "/root"})
    assert settings.scrape_seconds == 2
    assert settings.watch_namespaces == ()
    assert settings.namespace == "busload-system"
    assert settings.identity


def test_values() -> None:
    settings = Settings.from_environment({**IMAGE, "BUSLOAD_WATCH_NAMESPACES": " a, b,,a ", "BUSLOAD_HTTP_PORT": "0"})
    assert settings.watch_namespaces == ("a", "b")
    assert settings.http_port == 0


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("BUSLOAD_RUNTIME_IMAGE", "", "is not set: it must name the image"),
        ("BUSLOAD_SCRAPE_SECONDS", "often", "valid number"),
        ("BUSLOAD_SCRAPE_SECONDS", "0", "greater than or equal to 0.2"),
        ("BUSLOAD_SCRAPE_SECONDS", "nan", "less than or equal to 60"),
        ("BUSLOAD_IMAGE_PULL_POLICY", "Sometimes", "'Always', 'IfNotPresent' or 'Never'"),
        ("BUSLOAD_LOG_LEVEL", "LOUD", "'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ("BUSLOAD_WATCH_NAMESPACES", "Team_A", "'Team_A' is no namespace name"),
        ("BUSLOAD_NAMESPACE", "a/b", "is no namespace name"),
        ("BUSLOAD_HTTP_PORT", "70000", "less than or equal to 65535"),
        ("BUSLOAD_GPU_RUNTIME_IMAGE", "x" * 513, "at most 512 characters"),
        ("BUSLOAD_MEMORY_BANDWIDTH", "0", "greater than 0"),
        ("BUSLOAD_MEMORY_BANDWIDTH", "nan", "less than 1000000"),
        ("BUSLOAD_RECORD_DIRECTORY", "/no/such/folder", "not a directory that can be written to; create it"),
        ("BUSLOAD_RECORD_MAX_MIB", "0", "greater than or equal to 1"),
    ],
)
def test_a_wrong_value_names_the_variable_and_what_is_allowed(name: str, value: str, hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({**IMAGE, name: value})
    text = str(caught.value)
    assert text.startswith(name)
    assert hint in text
    assert "\n" not in text


def test_all_wrong_values_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({"BUSLOAD_HTTP_PORT": "x", "BUSLOAD_WORKERS": "0"})
    assert len(str(caught.value).splitlines()) == 3
