//! Compares the placement settings of a node with those of the last start, and with those of the other nodes of the group. A
//! difference would move blocks, and is reported before the node serves.

use crate::peers::PeerConnector;
use serde::{Deserialize, Serialize};
use spurline_client::placement::PLACEMENT_RULE;
use spurline_config::{Fault, NodeConfig};
use spurline_sys::replace_file;
use spurline_types::{Member, Size};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// In each cache directory.
pub(crate) const SETTINGS_FILE: &str = "settings.json";
/// Time limit of the query to another node.
const SETTINGS_QUERY_TIMEOUT: Duration = Duration::from_secs(1);
/// Other nodes to query.
const QUERIED_NODES: usize = 3;

/// A setting that differs.
#[derive(Debug, PartialEq, Eq)]
struct SettingDifference {
    what: String,
    remedy: String,
}

/// The settings in stored form.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct PlacementSettings {
    name: Option<String>,
    zone: Option<String>,
    rule: Option<u64>,
    group: Option<String>,
    registry: Option<String>,
}

impl PlacementSettings {
    fn new(config: &NodeConfig) -> PlacementSettings {
        let group = config.group.as_ref();
        PlacementSettings {
            name: config.name.clone(),
            zone: Some(group.map_or_else(String::new, |group| group.zone.clone())),
            rule: Some(PLACEMENT_RULE.into()),
            group: group.map(|group| group.name.clone()),
            registry: group.map(|group| group.registry.to_string()),
        }
    }
}

/// Whether both belong to a node of the same group and registry. With another group or registry, possibly by a typing
/// error, the node has to be admitted first.
fn same_group(before: &PlacementSettings, now: &PlacementSettings) -> bool {
    before.group.is_some() && before.group == now.group && before.registry.is_some() && before.registry == now.registry
}

/// The differences; a setting that either side lacks is no difference.
fn list_differences(before: &PlacementSettings, now: &PlacementSettings) -> Vec<SettingDifference> {
    let mut out = Vec::new();
    for (flag, old, new) in [("--name", &before.name, &now.name), ("--zone", &before.zone, &now.zone)] {
        let (Some(old), Some(new)) = (old, new) else { continue };
        if old != new {
            let remedy = if old.is_empty() { format!("no {flag}") } else { format!("{flag} {old}") };
            out.push(SettingDifference { what: format!("{flag} was '{old}' and is '{new}'"), remedy });
        }
    }
    if let (Some(old), Some(new)) = (before.rule, now.rule)
        && old != new
    {
        let what = format!("the release before placed blocks by rule {old}, this one does by rule {new}");
        out.push(SettingDifference { what, remedy: "the release before".into() });
    }
    out
}

fn difference_fault(where_from: &str, differing: &[SettingDifference]) -> Fault {
    let list = |of: &dyn Fn(&SettingDifference) -> &str| differing.iter().map(of).collect::<Vec<_>>();
    Fault::usage(
        format!("{where_from}: {}: blocks would be looked for in other places", list(&|d| &d.what).join("; ")),
        format!(
            "start it with {}, or give --yes: what is held by the old settings is fetched again",
            list(&|d| &d.remedy).join(" and ")
        ),
    )
}

/// Cache directories that get the current settings once the node has joined the group.
#[must_use]
pub struct SettingsMarks {
    dirs: Vec<PathBuf>,
    now: PlacementSettings,
    was_member: bool,
}

impl SettingsMarks {
    /// Whether the node was a member of the group before, with this cache.
    pub fn before(&self) -> bool {
        self.was_member
    }

    /// Writes the marks. A refused start must not: no block is cached by the settings of that start.
    pub fn write_marks(self) {
        for dir in &self.dirs {
            write_settings(&dir.join(SETTINGS_FILE), &self.now);
        }
    }
}

/// Compares with the marks in the cache directories, if the node `caches` there.
///
/// # Errors
/// With exit code 2 when a setting differs without --yes.
pub fn compare_with_before(config: &NodeConfig, caches: bool) -> Result<SettingsMarks, Fault> {
    let mut marks = SettingsMarks { dirs: Vec::new(), now: PlacementSettings::new(config), was_member: false };
    if config.group.is_none() || !caches {
        return Ok(marks);
    }
    let now = &marks.now;
    for dir in &config.cache.dirs {
        let file = dir.join(SETTINGS_FILE);
        let before: PlacementSettings =
            std::fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
        let differing = list_differences(&before, now);
        if !differing.is_empty() && !config.accept {
            return Err(difference_fault(&format!("the cache in {}", dir.display()), &differing));
        }
        differing.iter().for_each(|d| tracing::warn!("accepted by --yes: {}", d.what));
        marks.was_member |= same_group(&before, now);
        if before != *now {
            marks.dirs.push(dir.clone());
        }
    }
    Ok(marks)
}

fn write_settings(file: &Path, now: &PlacementSettings) {
    let stored = serde_json::to_vec(now).map_err(std::io::Error::from);
    if let Err(error) = stored.and_then(|text| replace_file(file, &text, 0o644)) {
        // A full or faulty disk still serves blocks.
        tracing::warn!("{}: the node's settings were not kept: {error}", file.display());
    }
}

/// Compares with some of the other nodes.
///
/// # Errors
/// With exit code 2 when a setting differs without --yes.
pub fn compare_with_others(
    config: &NodeConfig,
    own_name: &str,
    members: &[std::sync::Arc<Member>],
    reach: &PeerConnector,
) -> Result<(), Fault> {
    let own = config.cache.block_size;
    for member in members.iter().filter(|member| member.name != own_name).take(QUERIED_NODES) {
        let pool = reach.pool(member);
        // A node that does not answer is skipped.
        let Ok(lease) = pool.checkout(Instant::now() + SETTINGS_QUERY_TIMEOUT) else { continue };
        let size = lease.welcome().block_size;
        let rule = Some(lease.welcome().placement_rule).filter(|rule| *rule != 0);
        let mut differing = Vec::new();
        if size != own {
            let own = Size(own);
            let size = Size(size);
            let what = format!("--block-size is {own} here and {size} there");
            differing.push(SettingDifference { what, remedy: format!("--block-size {size}") });
        }
        if let Some(rule) = rule.filter(|rule| *rule != PLACEMENT_RULE) {
            let what = format!("this release places blocks by rule {PLACEMENT_RULE}, that one by rule {rule}");
            differing.push(SettingDifference { what, remedy: "the release that the others run".into() });
        }
        if !differing.is_empty() && !config.accept {
            return Err(difference_fault(&format!("node {} of the group", member.name), &differing));
        }
        differing.iter().for_each(|d| tracing::warn!("accepted by --yes, beside node {}: {}", member.name, d.what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::unnecessary_wraps)]
    fn text(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn a_node_was_in_its_group_before_only_by_the_same_name_and_registry() {
        let now = PlacementSettings {
            name: text("a"),
            group: text("g"),
            registry: text("etcd://h:1"),
            ..PlacementSettings::default()
        };
        assert!(same_group(&now, &now));
        let in_other_group = PlacementSettings { group: text("h"), ..now.clone() };
        let of_other_registry = PlacementSettings { registry: text("etcd://h:2"), ..now.clone() };
        for before in [in_other_group, of_other_registry] {
            assert!(!same_group(&before, &now));
            assert_eq!(list_differences(&before, &now), []);
        }
        let nameless = PlacementSettings::default();
        let alone = PlacementSettings { name: text("a"), ..PlacementSettings::default() };
        assert!(!same_group(&nameless, &now) && !same_group(&alone, &now));
    }

    #[test]
    fn each_setting_that_differs_is_named_with_both_values() {
        let settings = |name: Option<String>, zone: &str, rule: u64| PlacementSettings {
            name,
            zone: text(zone),
            rule: Some(rule),
            ..PlacementSettings::default()
        };
        let now = settings(text("b"), "r1", 528);
        assert_eq!(list_differences(&PlacementSettings::default(), &now), []);
        assert_eq!(list_differences(&now, &now), []);
        assert_eq!(list_differences(&settings(None, "r1", 528), &now), [], "it had no name of its own");
        let all = list_differences(&settings(text("a"), "", 272), &now);
        let words: Vec<_> = all.iter().map(|d| (d.what.as_str(), d.remedy.as_str())).collect();
        assert_eq!(words[0], ("--name was 'a' and is 'b'", "--name a"));
        assert_eq!(words[1], ("--zone was '' and is 'r1'", "no --zone"));
        assert!(words[2].0.contains("272") && words[2].0.contains("528"));
        let fault = difference_fault("the cache in /c", &all).to_string();
        assert!(fault.contains("--name a and no --zone") && fault.contains("--yes"), "{fault}");
    }
}
