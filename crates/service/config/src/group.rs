//! The cache group and its registry, and how files are read from its nodes: settings and checks.

use crate::values::ReplicaCounts;
use spurline_membership::url::RegistryUrl as Registry;
use spurline_types::fault::Fault;
use spurline_types::parse_duration;
use std::str::FromStr as _;
use std::time::Duration;

/// The default group.
pub const DEFAULT_GROUP: &str = "default";

settings! {
    /// The cache group, and the registry that lists its members.
    #[command(next_help_heading = "Group")]
    pub struct RawGroup {
        /// Registry of the group: static:HOST:PORT[,…], dns:NAME:PORT, coordinator://… or etcd://… [default: none, runs
        /// alone]
        ///
        /// A mount with a registry reads from the nodes and holds neither credentials nor a disk cache. A node registers
        /// with a coordinator or etcd; a list and a name are for mounts. A group has one coordinator; use etcd where the
        /// registry must survive the loss of a host. A name that begins with an underscore is one of SRV records, which
        /// contain the ports: dns:_spurline._tcp.NAME. etcd with TLS and a user:
        /// etcd://HOST:2379[,…]?ca=FILE&cert=FILE&key=FILE&user=NAME&password-file=FILE (or the password in
        /// SPURLINE_ETCD_PASSWORD).
        #[arg(long, value_name = "URL")]
        pub registry: Option<Registry>,
        /// Name of the group in the registry [default: default]
        #[arg(long, value_name = "NAME")]
        pub cache_group: Option<String>,
        /// Zone of this machine, such as a rack, a room or a cloud zone; readers prefer copies in their own zone
        #[arg(long, value_name = "NAME", default_value_t)]
        pub zone: String,
        /// Keep the share of a node that left the registry for this long; five times as long when half of the nodes left
        ///
        /// Meanwhile its blocks are read through other nodes. A restart within this time moves no block.
        #[arg(long, value_name = "TIME")]
        pub member_hold: Duration = parse_duration("1m"),
    }
}

settings! {
    /// How files are read from the nodes of a group; the checks change no value.
    #[command(next_help_heading = "Group")]
    pub struct NodeReads {
        /// Number of nodes that hold each file, with exceptions for some paths: N[,PATH=N]
        ///
        /// Use the same number in all mounts and gateways of a group. A mount with another number looks for copies that
        /// may not exist, which costs a fetch but causes no error.
        #[arg(long, value_name = "N[,PATH=N]")]
        pub replicas: ReplicaCounts = ReplicaCounts::from_str("1"),
        /// Send a slow read to a second node too, after this time at the earliest; 0 disables it
        ///
        /// A read counts as slow when it takes longer than this and longer than almost all long reads from the other
        /// nodes. The first good answer is used. At most one request in twenty is sent twice, and none when most nodes
        /// are slow. A node that is slow repeatedly is tried last until a trial read is fast again.
        #[arg(long, value_name = "TIME")]
        pub hedge_after: Duration = parse_duration("50ms"),
    }
}

/// A cache group and the registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    /// The group's name.
    pub name: String,
    /// The registry.
    pub registry: Registry,
    /// The zone that this machine shares with near machines; empty if not given.
    pub zone: String,
    /// How long the group waits for a node that left the registry before the node's blocks move.
    pub hold: Duration,
}

impl RawGroup {
    /// Checks the names; `None` without a registry.
    pub(crate) fn check(self) -> Result<Option<GroupConfig>, Fault> {
        if let Some(name) = &self.cache_group {
            check_name("--cache-group", name)?;
            if self.registry.is_none() {
                return Err(Fault::usage(
                    format!("--cache-group {name} without --registry: the addresses of its nodes are unknown"),
                    "give --registry coordinator://HOST:PORT, or leave --cache-group out",
                ));
            }
        }
        if !self.zone.is_empty() {
            check_name("--zone", &self.zone)?;
        }
        let name = self.cache_group.unwrap_or_else(|| DEFAULT_GROUP.to_owned());
        let zone = self.zone;
        let hold = self.member_hold;
        Ok(self.registry.map(|registry| GroupConfig { name, registry, zone, hold }))
    }
}

/// Minimum hedge delay: below, a busy processor looks like a late reply.
const LEAST_HEDGE: Duration = Duration::from_millis(1);

impl NodeReads {
    /// Checks the delay.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        let after = self.hedge_after;
        if !after.is_zero() && after < LEAST_HEDGE {
            return Err(Fault::usage(
                format!("--hedge-after {after:?} would send nearly every read to a second node as well"),
                "give 1ms or more, or 0 for never; 50ms is the default",
            ));
        }
        Ok(())
    }
}

/// The name of a group, node or zone: a word that fits in a line and in an etcd path.
pub(crate) fn check_name(flag: &str, name: &str) -> Result<(), Fault> {
    if name.is_empty() || name.len() > 255 || name.contains(is_odd_character) {
        return Err(Fault::usage(
            format!("{flag} '{}' is not a valid name", name.escape_debug()),
            "give a word of at most 255 bytes without blanks and slashes",
        ));
    }
    Ok(())
}

fn is_odd_character(c: char) -> bool {
    c.is_control() || c.is_whitespace() || c == '/'
}
