//! Membership of a cache group: registries that say which nodes there are, how a node keeps its name in one, and the
//! view of the members that outlives a registry. It knows neither what nodes hold nor how they are reached for data.
#![forbid(unsafe_code)]

mod announce;
mod book;
mod coordinator;
mod dns;
mod door;
mod etcd;
mod etcd_book;
mod etcd_jobs;
mod etcd_session;
mod fixed;
mod follow;
mod jobs;
mod kept;
mod local;
mod record;
mod roll;
mod server;
pub mod url;
mod view;

pub use announce::Announcer;
pub use book::{Book, Merge, later};
pub use etcd_jobs::{Begun, JobNow, JobStore, StoredJob};
pub use follow::{Audience, Follower, Seen, State};
pub use jobs::{Jobs, ask_jobs};
pub use roll::{Limits, Roll};
pub use server::{Coordinator, CoordinatorConfig};
pub use view::{Holds, View};

use spurline_trust::Trust;
use spurline_types::{Member, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};
use url::RegistryUrl as Url;

/// The messages of the control plane, made from `proto/spurline/group.proto`.
mod pb {
    #![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
    tonic::include_proto!("spurline.group.v1");
}

/// The part of etcd's messages that is used, made from `proto/etcd/rpc.proto`.
mod etcdpb {
    #![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
    tonic::include_proto!("etcdserverpb");
}

/// Something that knows which nodes a group has. Opening one does nothing yet; every call has a deadline.
pub trait Registry: Send + Sync + 'static {
    /// The registry as a person wrote it, without secrets.
    fn describe(&self) -> &str;

    /// Begins to look at the members.
    fn watch(&self) -> Box<dyn Watch>;

    /// A place to keep a node's name in; `None` where nodes are listed by somebody else.
    fn lease(&self) -> Option<Box<dyn Lease>>;

    /// A place to keep what the group goes by, two texts of which are brought together by `merge`; `None` where nothing can
    /// be kept.
    fn book(&self, _merge: Merge) -> Option<Box<dyn Book>> {
        None
    }
}

/// A look at the members of a group that goes on.
pub trait Watch: Send {
    /// Waits until `until` for the members to be others than those given last, and gives all of them, those that are as
    /// before as the very same; connecting may take some seconds more. `None` when the registry answers and nothing changed. After an error the next call tries again.
    ///
    /// # Errors
    /// When the registry can't be reached or stopped to answer, saying what was tried.
    fn next(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>>;
}

/// A node's name in a registry.
pub trait Lease: Send {
    /// Says that `member` is there; answers for how long that holds.
    ///
    /// # Errors
    /// `Invalid` when another process holds the name, naming both addresses; else when the registry can't be reached.
    fn renew(&mut self, member: &Member, until: Instant) -> Result<Duration>;

    /// Gives the name back. That it can't be is no error: the lease runs out.
    fn release(&mut self, until: Instant);
}

/// How long a node's registration lasts without another word from it; it speaks three times as often.
pub const LEASE: Duration = Duration::from_secs(15);

/// How long a registry may take to be connected to, and to answer one question.
const ANSWER: Duration = Duration::from_secs(5);

/// Opens the registry behind a URL for one group; coordinators are shown what `trust` has, and have to show the same.
/// An etcd has users and certificates of its own.
///
/// # Errors
/// When the URL can't be right, or a file it names can't be read.
pub fn open(url: &Url, group: &str, trust: &Arc<Trust>) -> Result<Arc<dyn Registry>> {
    Ok(match url {
        Url::Static(nodes) => Arc::new(fixed::Fixed::new(nodes)),
        Url::Dns(name) => Arc::new(dns::Dns::new(name)?),
        Url::Etcd(url) => Arc::new(etcd::Etcd::new(url, group)?),
        Url::Coordinator(at) => Arc::new(coordinator::Client::new(at, group, trust)?),
    })
}

/// Whether one process may take the name of another: it holds the same first address, where only one can listen, or
/// it is the same process.
fn takes_over(old: &Member, new: &Member) -> bool {
    old.instance == new.instance || (!new.addresses.is_empty() && old.addresses.first() == new.addresses.first())
}

/// The sentence for a name that two processes want.
fn two_of_one_name(group: &str, held: &Member, refused: &Member) -> String {
    format!(
        "group {group} has a node '{}' already, at {}; the one at {} is another process and was refused: give one of \
         them another --name",
        held.name,
        held.addresses.join(","),
        refused.addresses.join(","),
    )
}

/// A runtime of its own for registries that are asked by gRPC or DNS; the callers wait on it from their own threads.
fn runtime(name: &str) -> Result<tokio::runtime::Runtime> {
    runtime_of(name, 1)
}

/// A runtime with so many threads.
fn runtime_of(name: &str, threads: usize) -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name(name)
        .enable_all()
        .build()
        .map_err(|e| spurline_types::Error::io("a runtime for the registry", &e))
}
