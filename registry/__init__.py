"""Layer groups in OCI registries and local OCI image layouts: references, manifests, push, resolve, ranges of blobs.

What reads images (`registry.images`) and publishes what must be converted first (`registry.publish`) is imported by name.
"""

from registry.credentials import Credentials, load_credentials
from registry.errors import (
    AuthenticationFailed,
    IntegrityError,
    InvalidReference,
    NoSpace,
    NotFound,
    RegistryError,
    Unreachable,
)
from registry.group import Group, describe_layer, pull_blob, push_group, resolve_group
from registry.manifest import GroupConfig, LayerDescriptor
from registry.ranges import Connections, RangeReader, open_ranges
from registry.reference import LayoutReference, Reference, RegistryReference, parse_reference

__all__ = [
    "AuthenticationFailed",
    "Connections",
    "Credentials",
    "Group",
    "GroupConfig",
    "IntegrityError",
    "InvalidReference",
    "LayerDescriptor",
    "LayoutReference",
    "NoSpace",
    "NotFound",
    "RangeReader",
    "Reference",
    "RegistryError",
    "RegistryReference",
    "Unreachable",
    "describe_layer",
    "load_credentials",
    "open_ranges",
    "parse_reference",
    "pull_blob",
    "push_group",
    "resolve_group",
]
