//! The settings of a node that decide where blocks are: what they were when its cache was filled, and what the other
//! nodes of its group have. A difference would have blocks fetched anew, so it is said before anything is served.

use crate::peers::Reach;
use serde_json::{Value, json};
use spurline_client::placement::PLACEMENT_RULE;
use spurline_config::{Fault, NodeConfig};
use spurline_types::{Member, Size};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Beside the cache, in each of its directories.
const FILE: &str = "settings.json";
/// How long one other node may take to say what it has.
const ANSWER: Duration = Duration::from_secs(1);
/// Other nodes that are asked.
const ASKED: usize = 3;

/// One setting that differs.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    what: String,
    remedy: String,
}

/// The settings as they are kept.
fn now(config: &NodeConfig) -> Value {
    let group = config.group.as_ref();
    json!({
        "name": config.name,
        "zone": group.map_or("", |group| &group.zone),
        "rule": PLACEMENT_RULE,
        "group": group.map(|group| &group.name),
        "registry": group.map(|group| group.registry.to_string()),
    })
}

/// Whether both are of a node in the same group, by the same registry. A cache may serve another one, which a slip of the
/// pen looks like: that node has to be let in first.
fn same_group(before: &Value, now: &Value) -> bool {
    ["group", "registry"].iter().all(|key| before[key].is_string() && before[key] == now[key])
}

/// What differs between two of them; what is not known of one of them does not.
fn differences(before: &Value, now: &Value) -> Vec<Difference> {
    let mut out = Vec::new();
    for (key, flag) in [("name", "--name"), ("zone", "--zone")] {
        let (Some(old), Some(new)) = (before[key].as_str(), now[key].as_str()) else { continue };
        if old != new {
            let remedy = if old.is_empty() { format!("no {flag}") } else { format!("{flag} {old}") };
            out.push(Difference { what: format!("{flag} was '{old}' and is '{new}'"), remedy });
        }
    }
    if let (Some(old), Some(new)) = (before["rule"].as_u64(), now["rule"].as_u64())
        && old != new
    {
        let what = format!("the release before placed blocks by rule {old}, this one does by rule {new}");
        out.push(Difference { what, remedy: "the release before".into() });
    }
    out
}

fn refuse(where_from: &str, differing: &[Difference]) -> Fault {
    let list = |of: &dyn Fn(&Difference) -> &str| differing.iter().map(of).collect::<Vec<_>>();
    Fault::usage(
        format!("{where_from}: {}: blocks would be looked for in other places", list(&|d| &d.what).join("; ")),
        format!(
            "start it with {}, or give --yes: what is held by the old settings is fetched again",
            list(&|d| &d.remedy).join(" and ")
        ),
    )
}

/// The cache directories that are to be marked with the settings of now, once the node is in its group.
#[must_use]
pub struct Marks {
    dirs: Vec<PathBuf>,
    now: Value,
    before: bool,
}

impl Marks {
    /// Whether the node was in its group before, with the cache that it has.
    pub fn before(&self) -> bool {
        self.before
    }

    /// Marks them. A start that is refused must not: nothing is held by its settings, and the next one may be right.
    pub fn keep(self) {
        for dir in &self.dirs {
            keep(dir, &dir.join(FILE), &self.now);
        }
    }
}

/// Compares with what the cache directories were filled by, if the node `caches` there.
///
/// # Errors
/// With exit code 2 when a setting differs and that was not accepted.
pub fn compare_with_before(config: &NodeConfig, caches: bool) -> Result<Marks, Fault> {
    let mut marks = Marks { dirs: Vec::new(), now: now(config), before: false };
    if config.group.is_none() || !caches {
        return Ok(marks);
    }
    let now = &marks.now;
    for dir in &config.cache.dirs {
        let file = dir.join(FILE);
        let before: Value =
            std::fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or(Value::Null);
        let differing = differences(&before, now);
        if !differing.is_empty() && !config.accept {
            return Err(refuse(&format!("the cache in {}", dir.display()), &differing));
        }
        differing.iter().for_each(|d| tracing::warn!("accepted by --yes: {}", d.what));
        marks.before |= same_group(&before, now);
        if before != *now {
            marks.dirs.push(dir.clone());
        }
    }
    Ok(marks)
}

fn keep(dir: &Path, file: &Path, now: &Value) {
    let new = dir.join(format!("{FILE}.new"));
    let written = std::fs::write(&new, now.to_string()).and_then(|()| std::fs::rename(&new, file));
    if let Err(error) = written {
        // A disk that is full or bad serves what it has.
        tracing::warn!("{}: the node's settings were not kept: {error}", file.display());
    }
}

/// Compares with what some of the other nodes have.
///
/// # Errors
/// With exit code 2 when a setting differs and that was not accepted.
pub fn compare_with_others(
    config: &NodeConfig,
    own_name: &str,
    members: &[std::sync::Arc<Member>],
    reach: &Reach,
) -> Result<(), Fault> {
    let own = config.cache.block_size;
    for member in members.iter().filter(|member| member.name != own_name).take(ASKED) {
        let pool = reach.pool(member);
        // One that does not answer says nothing.
        let Ok(lease) = pool.checkout(Instant::now() + ANSWER) else { continue };
        let (size, rule) = (lease.welcome().block_size, Some(lease.welcome().placement_rule).filter(|rule| *rule != 0));
        let mut differing = Vec::new();
        if size != own {
            let (own, size) = (Size(own), Size(size));
            let what = format!("--block-size is {own} here and {size} there");
            differing.push(Difference { what, remedy: format!("--block-size {size}") });
        }
        if let Some(rule) = rule.filter(|rule| *rule != PLACEMENT_RULE) {
            let what = format!("this release places blocks by rule {PLACEMENT_RULE}, that one by rule {rule}");
            differing.push(Difference { what, remedy: "the release that the others run".into() });
        }
        if !differing.is_empty() && !config.accept {
            return Err(refuse(&format!("node {} of the group", member.name), &differing));
        }
        differing.iter().for_each(|d| tracing::warn!("accepted by --yes, beside node {}: {}", member.name, d.what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_was_in_its_group_before_only_by_the_same_name_and_registry() {
        let now = json!({"name": "a", "group": "g", "registry": "etcd://h:1"});
        assert!(same_group(&now, &now));
        for (key, other) in [("group", "h"), ("registry", "etcd://h:2")] {
            let mut before = now.clone();
            before[key] = json!(other);
            assert!(!same_group(&before, &now));
            assert_eq!(differences(&before, &now), []);
        }
        assert!(!same_group(&Value::Null, &now) && !same_group(&json!({"name": "a"}), &now));
    }

    #[test]
    fn each_setting_that_differs_is_named_with_both_values() {
        let now = json!({"name": "b", "zone": "r1", "rule": 528});
        assert_eq!(differences(&Value::Null, &now), []);
        assert_eq!(differences(&now, &now), []);
        assert_eq!(
            differences(&json!({"name": null, "zone": "r1", "rule": 528}), &now),
            [],
            "it had no name of its own"
        );
        let all = differences(&json!({"name": "a", "zone": "", "rule": 272}), &now);
        let words: Vec<_> = all.iter().map(|d| (d.what.as_str(), d.remedy.as_str())).collect();
        assert_eq!(words[0], ("--name was 'a' and is 'b'", "--name a"));
        assert_eq!(words[1], ("--zone was '' and is 'r1'", "no --zone"));
        assert!(words[2].0.contains("272") && words[2].0.contains("528"));
        let fault = refuse("the cache in /c", &all).to_string();
        assert!(fault.contains("--name a and no --zone") && fault.contains("--yes"), "{fault}");
    }
}
