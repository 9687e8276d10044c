"""Thin adapter: decisions of `pivot.serving.launch`, `pivot.logs.starts` and `pivot.engines.rollback` as filters."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pivot.engines import rollback
from pivot.inventory import paths
from pivot.logs import starts
from pivot.serving import drift, launch, nccl


def check(
    flags: Mapping[str, Any], environment: Mapping[str, Any], subject: str, api_key: object = None
) -> list[dict[str, str]]:
    """Findings about launch settings, as dictionaries."""
    return [finding.as_dict() for finding in launch.check(subject, flags, environment, api_key)]


def phases(lines: Sequence[tuple[float, str]]) -> list[dict[str, Any]]:
    """Phases of a start, as dictionaries."""
    return [dataclasses.asdict(phase) for phase in starts.phases(lines)]


def argv(flags: Mapping[str, Any], python: str, config: str) -> list[str]:
    """The server's command line."""
    return launch.argv(python, config, flags)


def restart_findings(reasons: Sequence[str], subject: str, allowed: bool) -> list[dict[str, str]]:
    """The refusal of a restart, as dictionaries; none where it is allowed."""
    return [finding.as_dict() for finding in drift.restart_findings(subject, reasons, allowed=allowed)]


def space(free: Mapping[str, int], subject: str) -> list[dict[str, str]]:
    """Findings about full file systems, as dictionaries."""
    return [finding.as_dict() for finding in launch.space(subject, free)]


def environment(own: Mapping[str, Any], profile: str | None) -> dict[str, Any]:
    """A server's variables, those of its NCCL profile included."""
    return nccl.environment(profile, own)


def named(
    flags: Mapping[str, Any], variables: Mapping[str, Any], directory: str, served: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The paths that settings name, as dictionaries."""
    return [dataclasses.asdict(item) for item in paths.named(flags, variables, directory, served)]


def files(
    wanted: Sequence[Mapping[str, Any]], seen: Mapping[str, Mapping[str, Any]], unit: str, subject: str
) -> list[dict[str, str]]:
    """Findings about files that settings name, as dictionaries."""
    known = [paths.Named(**item) for item in wanted]
    return [finding.as_dict() for finding in paths.check(subject, known, seen, unit)]


class FilterModule:
    """Filters about launching a server."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as the roles and templates use them."""
        return {
            "pivot_rollback": rollback.plan,
            "pivot_rollback_due": rollback.due,
            "pivot_launch_argv": argv,
            "pivot_launch_check": check,
            "pivot_launch_config": launch.config_text,
            "pivot_launch_differences": launch.differences,
            "pivot_launch_drafter_config": launch.drafter_config,
            "pivot_launch_environment": launch.environment_text,
            "pivot_launch_environment_of": environment,
            "pivot_launch_files": files,
            "pivot_launch_layer_ids": launch.configured_layer_ids,
            "pivot_launch_named": named,
            "pivot_launch_restart_findings": restart_findings,
            "pivot_launch_restart_reasons": drift.restart_reasons,
            "pivot_launch_scalar": launch.scalar,
            "pivot_launch_settings": launch.settings,
            "pivot_launch_sha256": launch.sha256,
            "pivot_launch_space": space,
            "pivot_launch_unit_words": launch.unit_words,
            "pivot_launch_url": launch.url,
            "pivot_launch_view_digest": launch.view_digest,
            "pivot_logs_cause": starts.cause,
            "pivot_logs_phases": phases,
        }
