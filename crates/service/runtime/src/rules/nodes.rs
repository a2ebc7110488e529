//! The registry and the nodes of a group for `pin` and the like: the rules there, the size of a folder, and the application of
//! the folder's rule to held blocks.

use crate::group_nodes::query_members;
use crate::peers::PeerConnector;
use crate::{group, setup};
use spurline_client::{GroupVolume, ObjectExtent};
use spurline_config::{Fault, Registry, TrustConfig};
use spurline_membership::{HoldTimes, RegistryFollower};
use spurline_proto::NodeRequest;
use spurline_rules::{NodeRules, RuleSet, RuleStore};
use spurline_types::units::human_bytes;
use spurline_types::{Error, ErrorKind, FileKind, Member, ObjectAttr, ObjectRef, Result, Stats, Version, url};
use spurline_volume::Volume as _;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the registry may take to name the nodes, and a node to answer.
const RULES_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const FOLDER_PAGE_NAMES: usize = 1000;
/// Files per request to a node.
const REQUEST_FILES: usize = 512;

/// A node and the answer.
pub struct NodeAnswer {
    /// The node.
    pub member: Arc<Member>,
    /// The rules, the held bytes of each, the room for pins, the sources.
    pub answer: Result<NodeRules>,
}

/// The registry and the nodes.
pub struct RuleNodes {
    name: String,
    rules: RuleStore,
    reach: PeerConnector,
    members: Vec<Arc<Member>>,
}

impl RuleNodes {
    /// The registry, the nodes, and the stored rules.
    ///
    /// # Errors
    /// When this kind of registry stores no rules, refuses, or can't be reached.
    pub fn open(
        registry: &Registry,
        name: &str,
        trust: &TrustConfig,
    ) -> std::result::Result<(RuleNodes, RuleSet), Fault> {
        let host = group::hostname();
        let stats = Arc::new(Stats::default());
        let trust = setup::open_trust(trust, &host)?;
        let opened = spurline_membership::open_registry(registry, name, &trust)?;
        let Some(rules) = RuleStore::open(opened.as_ref()) else {
            return Err(Fault::usage(
                format!("{registry} lists nodes and keeps nothing, so the group can have no rules"),
                "run 'spurline coordinator', or an etcd, and give its coordinator://HOST:PORT or etcd://HOST:PORT to \
                 nodes, mounts and here",
            ));
        };
        let unreached = |error: &Error, remedy: &str| {
            let refused = error.kind() == ErrorKind::PermissionDenied;
            Fault::missing(format!("group {name}: {error}"), if refused { "" } else { remedy })
        };
        let set = rules.read().map_err(|error| match error.kind() {
            ErrorKind::Invalid => {
                Fault::failed(format!("the rules in {registry} can't be read: {error}"), "are they of a newer release?")
            }
            _ => unreached(&error, "start the registry, or correct --registry"),
        })?;
        let follower = RegistryFollower::start(&opened, HoldTimes::default(), Arc::clone(&stats))?;
        let members = match follower.first_members_once(Instant::now() + RULES_ANSWER_TIMEOUT) {
            Ok(members) => members,
            // Such nodes get the rules at the start.
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(unreached(&error, "start the registry, or correct --registry")),
        };
        let reach = PeerConnector::for_calls(format!("{host}:rules"), trust, stats);
        Ok((RuleNodes { name: name.to_owned(), rules, reach, members }, set))
    }

    /// Changes the rules in the registry and returns the result. `change` gets the stored rules, or `known` where these are
    /// newer; `change` is called again after a concurrent change.
    ///
    /// # Errors
    /// The fault of `change`, and when the registry does not answer.
    pub fn change(
        &self,
        known: &RuleSet,
        change: impl FnMut(&RuleSet) -> std::result::Result<RuleSet, Fault>,
    ) -> std::result::Result<RuleSet, Fault> {
        self.rules.change(known, change, |error| {
            Fault::missing(format!("group {}: {error}", self.name), "run it again when the registry answers")
        })
    }

    /// Requests the rules of every node, or sends `set`.
    pub fn query_nodes(&self, set: Option<&RuleSet>) -> Vec<NodeAnswer> {
        let text = set.map_or_else(String::new, RuleSet::to_text);
        query_members(&self.members, |member| NodeAnswer {
            member: Arc::clone(member),
            answer: exchange_with_node(&self.reach, member, &text),
        })
    }

    /// The bytes of all files at or below a URL.
    ///
    /// # Errors
    /// `NotFound` when there is nothing or no node serves the URL, else when nodes do not answer.
    pub fn size_of(&self, url: &str, told: &[NodeAnswer], progress: &dyn Fn(String), stop: &AtomicBool) -> Result<u64> {
        let sources = sources_in(told, |node| &node.sources);
        let mut places = places_in_sources(url, &sources);
        // A single source is enough where the URL is below several.
        let below = places
            .iter()
            .position(|(_, below)| !below.is_empty())
            .or_else(|| places.iter().position(|(source, _)| source == url));
        if let Some(one) = below {
            places = vec![places.swap_remove(one)];
        }
        if places.is_empty() {
            let what = if sources.is_empty() {
                "no node answers that could count its files".to_owned()
            } else {
                not_served(&sources)
            };
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        let mut sum = 0;
        let mut files = 0u64;
        for (source, below) in places {
            let remote = self.open_volume(&source, told)?;
            walk_files(&remote, &below, stop, &mut |_, attr| {
                sum += attr.size;
                files += 1;
                progress(format!("{url}: {files} files, {} so far", human_bytes(sum)));
                Ok(())
            })?;
        }
        Ok(sum)
    }

    /// Has every node that answered apply the present rules to blocks at or below a URL; returns the held bytes.
    ///
    /// # Errors
    /// When nodes do not answer, or after an interruption.
    pub fn classify_held(
        &self,
        url: &str,
        told: &[NodeAnswer],
        progress: &dyn Fn(String),
        stop: &AtomicBool,
    ) -> Result<u64> {
        // Blocks are named by the sources that mounts mount.
        let mut held = 0;
        for (source, below) in places_in_sources(url, &sources_in(told, |node| &node.volumes)) {
            let remote = self.open_volume(&source, told)?;
            let mut some = Vec::with_capacity(REQUEST_FILES);
            let mut tell = |some: &mut Vec<ObjectExtent>| -> Result<()> {
                for done in remote.classify(some) {
                    if let Some(error) = done.error {
                        return Err(error);
                    }
                    held += done.held_bytes;
                }
                progress(format!("{url}: {} held", human_bytes(held)));
                some.clear();
                Ok(())
            };
            let walked = walk_files(&remote, &below, stop, &mut |path, attr| {
                // Held blocks of a file that is open for writing are from before.
                let object = ObjectRef::new(&source, path, Version::new(attr.version.settled_text()), attr.size);
                some.push(ObjectExtent { bytes: 0..object.size, object });
                if some.len() == REQUEST_FILES { tell(&mut some) } else { Ok(()) }
            });
            match walked {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                other => other?,
            }
            tell(&mut some)?;
        }
        Ok(held)
    }

    /// The nodes that answered as a volume of `source`.
    fn open_volume(&self, source: &str, told: &[NodeAnswer]) -> Result<Arc<GroupVolume>> {
        let up = told.iter().filter(|one| one.answer.is_ok());
        let members: Vec<Arc<Member>> = up.map(|one| one.member.clone()).collect();
        let members = self.reach.group_members(source, &members);
        self.reach.open_group(source, members, RULES_ANSWER_TIMEOUT, RULES_ANSWER_TIMEOUT)
    }
}

/// Gives a node a text of rules, or none, and takes the answer.
fn exchange_with_node(reach: &PeerConnector, member: &Member, text: &str) -> Result<NodeRules> {
    let deadline = Instant::now() + RULES_ANSWER_TIMEOUT;
    let pool = reach.pool(member);
    let mut lease = pool.checkout(deadline)?;
    let mut body = Vec::new();
    lease.call(&NodeRequest::Rules { text }, &mut body, &mut [], &mut |_| {}, deadline)?;
    serde_json::from_slice(&body).map_err(|error| {
        Error::new(ErrorKind::Protocol, format!("the answer of node {} is malformed: {error}", member.name))
    })
}

/// Why nothing can be said of a folder.
pub fn not_served(sources: &BTreeSet<String>) -> String {
    let known: Vec<&str> = sources.iter().map(String::as_str).collect();
    format!("no node serves it; the nodes' sources (--source) are {}", known.join(", "))
}

/// The served or mounted sources of all nodes that answered.
pub fn sources_in(told: &[NodeAnswer], list: fn(&NodeRules) -> &Vec<String>) -> BTreeSet<String> {
    let lists = told.iter().filter_map(|node| node.answer.as_ref().ok()).map(list);
    lists.flatten().map(|source| source.trim_end_matches('/').to_owned()).collect()
}

/// Where a URL is in the sources: each source around the URL, with the path there; each source below, whole.
pub fn places_in_sources(url: &str, sources: &BTreeSet<String>) -> Vec<(String, Vec<u8>)> {
    sources
        .iter()
        .filter_map(|source| match url::path_below(url, source) {
            Some(path) => Some((source.clone(), path.into_owned())),
            None => url::path_below(source, url).map(|_| (source.clone(), Vec::new())),
        })
        .collect()
}

/// Calls `each` with every file at or below a path.
fn walk_files(
    remote: &GroupVolume,
    path: &[u8],
    stop: &AtomicBool,
    each: &mut dyn FnMut(&[u8], &ObjectAttr) -> Result<()>,
) -> Result<()> {
    let attr = remote.lookup(path)?;
    if attr.kind != FileKind::Directory {
        return each(path, &attr);
    }
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        let mut cursor: Option<Vec<u8>> = None;
        loop {
            if stop.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Unavailable, "it was interrupted"));
            }
            let page = remote.list(&folder, cursor.as_deref(), FOLDER_PAGE_NAMES)?;
            for entry in &page.entries {
                let slash: &[u8] = if folder.is_empty() { b"" } else { b"/" };
                let below = [&folder, slash, &entry.name].concat();
                match entry.attr.kind {
                    FileKind::Directory => folders.push(below),
                    _ => each(&below, &entry.attr)?,
                }
            }
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_found_in_all_sources_it_is_in_and_in_those_below_it() {
        let sources: BTreeSet<String> =
            ["s3://b", "s3://b/train", "s3://c", "s3://b/trainer"].map(str::to_owned).into_iter().collect();
        let places = |url: &str| {
            let found = places_in_sources(url, &sources);
            found.into_iter().map(|(source, path)| format!("{source} {}", path.escape_ascii())).collect::<Vec<_>>()
        };
        assert_eq!(places("s3://b/train/a"), ["s3://b train/a", "s3://b/train a"]);
        assert_eq!(places("s3://b/val"), ["s3://b val"]);
        assert_eq!(places("s3://b"), ["s3://b ", "s3://b/train ", "s3://b/trainer "]);
        let odd = BTreeSet::from(["file:///my%20data".to_owned()]);
        assert_eq!(
            super::places_in_sources("file:///my%20data/100%25", &odd),
            [("file:///my%20data".into(), b"100%".to_vec())]
        );
        assert!(places("s3://d").is_empty() && places("s3://bb").is_empty());
    }
}
