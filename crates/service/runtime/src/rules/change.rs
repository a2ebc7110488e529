//! Changes the rules of a group: checks, the registry's record, then the nodes.

use super::nodes::{self, NodeAnswer, RuleNodes};
use spurline_config::Fault;
use spurline_rules::{FolderRule, NodeRules, RuleSet};
use spurline_types::units::human_bytes;
use spurline_types::{ErrorKind, url};
use std::sync::atomic::{AtomicBool, Ordering};

/// A change of rules.
pub struct RuleChange<'a> {
    /// The change requires that the folders fit on the cache disks.
    pub pins: bool,
    /// A condition on the current rules.
    pub needs: &'a dyn Fn(&RuleSet) -> Result<(), Fault>,
    /// Applies the change to the rule of a folder.
    pub make: &'a dyn Fn(&mut FolderRule),
}

/// Changes the rules for `urls` in the registry, then on all nodes; returns the current rules and the nodes' answers.
///
/// # Errors
/// When the folders do not fit, a folder is served by no node, or the registry or all nodes can't be reached.
pub fn apply_change(
    nodes: &RuleNodes,
    kept: RuleSet,
    urls: &[String],
    change: &RuleChange<'_>,
    progress: &dyn Fn(String),
    stop: &AtomicBool,
) -> Result<(RuleSet, Vec<NodeAnswer>), Fault> {
    let before = nodes.query_nodes(None);
    // A registry that lost the rules gets the rules back with the change.
    let known = node_answers(&before).map(NodeRules::to_set);
    let known = known.fold(kept, RuleSet::or_newer);
    if change.pins {
        check_fits(nodes, &before, urls, progress, stop)?;
    } else {
        check_served(&before, &known, urls)?;
    }
    let now = nodes.change(&known, |base| {
        (change.needs)(base)?;
        let set = base.with_changes(urls, change.make).map_err(|error| Fault::failed(error.message(), ""))?;
        quota_holds_a_block(&before, &set, urls)?;
        if stop.load(Ordering::Acquire) { Err(interrupted_fault()) } else { Ok(set) }
    })?;
    let told = nodes.query_nodes(Some(&now));
    Ok((now, told))
}

/// Whether a URL is the folder or below.
pub fn is_within(url: &str, folder: &str) -> bool {
    url::path_below(url, folder).is_some()
}

/// Checks that the folders, and all other pins, fit into the space for pins.
fn check_fits(
    nodes: &RuleNodes,
    told: &[NodeAnswer],
    urls: &[String],
    progress: &dyn Fn(String),
    stop: &AtomicBool,
) -> Result<(), Fault> {
    let room: u64 = node_answers(told).map(|node| node.most_pinned_bytes).sum();
    // Pins below a folder are counted with the folder.
    let held = node_answers(told).flat_map(|node| &node.rules);
    let pinned_besides = held.filter(|held| held.rule.pin && !urls.iter().any(|new| is_within(&held.rule.url, new)));
    let taken: u64 = pinned_besides.map(|held| held.held_bytes).sum();
    let mut wanted = 0;
    for url in urls {
        wanted += nodes.size_of(url, told, progress, stop).map_err(|error| match error.kind() {
            _ if stop.load(Ordering::Acquire) => interrupted_fault(),
            ErrorKind::NotFound => Fault::failed(format!("{url}: {error}"), "name a folder or file that is there"),
            _ => {
                Fault::failed(format!("{url}: its files can't be counted: {error}"), "spurline status shows the nodes")
            }
        })?;
    }
    if wanted + taken > room {
        let most = spurline_store::PINNED_PERCENT;
        return Err(Fault::failed(
            format!(
                "{} has {}, {} is pinned besides, and the group can pin {} ({most} % of its cache disks); nothing was \
                 changed",
                urls.join(", "),
                human_bytes(wanted),
                human_bytes(taken),
                human_bytes(room)
            ),
            "pin a smaller folder, unpin another one, or give the nodes a larger --cache-size",
        ));
    }
    Ok(())
}

/// Checks that nodes serve each of the folders or a part, or that there is a rule.
fn check_served(told: &[NodeAnswer], rules: &RuleSet, urls: &[String]) -> Result<(), Fault> {
    let sources = nodes::sources_in(told, |node| &node.sources);
    match urls.iter().find(|url| {
        !rules.rules.iter().any(|rule| rule.url == **url) && nodes::places_in_sources(url, &sources).is_empty()
    }) {
        Some(url) if !sources.is_empty() => Err(Fault::failed(
            format!("{url}: {}; nothing was changed", nodes::not_served(&sources)),
            "name a folder of one of them",
        )),
        // Without an answer, the sources are unknown.
        _ => Ok(()),
    }
}

/// Why a quota is too small, and the smallest that is not: a node's share below a block caches nothing.
pub fn less_than_a_block(told: &[NodeAnswer], quota: u64) -> Option<(String, u64)> {
    let weights: u64 = told.iter().map(|one| u64::from(one.member.weight)).sum();
    let block = node_answers(told).map(|node| node.block_size).max().unwrap_or(0);
    let NodeAnswer { member, .. } =
        told.iter().filter(|one| one.member.weight > 0).min_by_key(|one| one.member.weight)?;
    let least = (u128::from(block) * u128::from(weights)).div_ceil(u128::from(member.weight)) as u64;
    if quota == 0 || quota >= least {
        return None;
    }
    let quota = human_bytes(quota);
    let block = human_bytes(block);
    let nodes = told.len();
    let what = format!(
        "a quota of {quota} is shared by {nodes} nodes, and the share of {} would be less than a block of {block}",
        member.name
    );
    Some((what, least))
}

/// Checks that every node's share of a quota is at least a block.
fn quota_holds_a_block(told: &[NodeAnswer], set: &RuleSet, urls: &[String]) -> Result<(), Fault> {
    let quotas = set.rules.iter().filter(|rule| urls.contains(&rule.url)).filter_map(|rule| rule.quota_bytes);
    match quotas.filter_map(|quota| less_than_a_block(told, quota)).next() {
        Some((what, least)) => {
            Err(Fault::failed(what, format!("give at least {}, or 0 to keep nothing of it", human_bytes(least))))
        }
        None => Ok(()),
    }
}

fn interrupted_fault() -> Fault {
    Fault::failed("it was interrupted", "nothing was changed; run it again")
}

/// The answers of the nodes that answered.
pub fn node_answers(told: &[NodeAnswer]) -> impl Iterator<Item = &NodeRules> {
    told.iter().filter_map(|one| one.answer.as_ref().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::Member;
    use std::sync::Arc;

    #[test]
    fn a_quota_that_keeps_nothing_is_refused() {
        let node = |weight| NodeAnswer {
            member: Arc::new(Member::from_address("a:1", weight)),
            answer: Ok(NodeRules { block_size: 4 << 20, ..NodeRules::default() }),
        };
        let told = [node(100), node(50), node(0)];
        let set = |quota| {
            let rule = FolderRule { url: "s3://b".into(), quota_bytes: Some(quota), ..FolderRule::default() };
            RuleSet { revision: 1, rules: vec![rule] }
        };
        let holds = |quota| quota_holds_a_block(&told, &set(quota), &["s3://b".to_owned()]);
        assert!(holds(12 << 20).is_ok() && holds(0).is_ok());
        let refused = holds((12 << 20) - 1).unwrap_err().to_string();
        assert!(refused.contains("a block of 4.00 MiB") && refused.contains("at least 12.0 MiB"), "{refused}");
        assert!(
            quota_holds_a_block(&told, &set(1), &["s3://c".to_owned()]).is_ok(),
            "another folder's is no matter here"
        );
        assert!(quota_holds_a_block(&[], &set(1), &["s3://b".to_owned()]).is_ok());
    }
}
