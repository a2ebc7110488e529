//! `spurline pin`, `unpin` and `limit`: change the rules of a group in the registry, then on the nodes. `spurline rules` lists
//! the rules.

use crate::cli::{LimitArgs, RuleArgs, RulesArgs};
use crate::signals;
use indicatif::{ProgressBar, ProgressDrawTarget};
use serde_json::{Value, json};
use spurline_config::{Fault, Registry, SourceUrl, TrustConfig};
use spurline_rules::{FolderRule, HeldRule, RuleSet, WriteClass};
use spurline_runtime::locator::locate_path;
use spurline_runtime::rules::change::{RuleChange, apply_change, is_within, less_than_a_block, node_answers};
use spurline_runtime::rules::describe_rule;
use spurline_runtime::rules::nodes::{NodeAnswer, RuleNodes};
use spurline_types::units::human_bytes;
use spurline_types::url;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The consequence for a node that could not be reached.
const UNREACHED_NODE_NOTE: &str =
    "; it follows the rules when it is back; run this again then, so that they apply to its cached blocks";

/// Runs `spurline pin`.
///
/// # Errors
/// When the folders do not fit, or the registry or all nodes can't be reached.
pub fn pin_folders(args: RuleArgs) -> Result<ExitCode, Fault> {
    run_change(&args, &RuleChange { pins: true, needs: &|_| Ok(()), make: &|rule| rule.pin = true })
}

/// Runs `spurline unpin`.
///
/// # Errors
/// When a folder is not pinned, or the registry can't be reached.
pub fn unpin_folders(args: RuleArgs) -> Result<ExitCode, Fault> {
    let urls = urls_of(&args.path)?;
    let pinned = |set: &RuleSet| {
        let Some(other) = urls.iter().find(|url| !set.rules.iter().any(|rule| rule.pin && rule.url == **url)) else {
            return Ok(());
        };
        let known: Vec<&str> = set.rules.iter().filter(|rule| rule.pin).map(|rule| rule.url.as_str()).collect();
        let what = format!("{other} is not pinned in group {}", args.group.cache_group);
        Err(match known.as_slice() {
            [] => Fault::failed(what, "no folder of the group is pinned"),
            some => Fault::failed(what, format!("these are: {}", some.join(", "))),
        })
    };
    run_change(&args, &RuleChange { pins: false, needs: &pinned, make: &|rule| rule.pin = false })
}

/// Runs `spurline limit`.
///
/// # Errors
/// When nothing is to be changed, or the registry can't be reached.
pub fn limit_folders(args: LimitArgs) -> Result<ExitCode, Fault> {
    let class = chosen_class(&args);
    let LimitArgs { ttl, quota, rule, .. } = &args;
    if ttl.is_none() && quota.is_none() && class.is_none() {
        return Err(Fault::usage(
            "no limit was given",
            "give --ttl TIME or --quota SIZE, where the word none takes one away, or --stage, --scratch or --direct",
        ));
    }
    if let Some(class) = class {
        check_class(class, &urls_of(&rule.path)?)?;
    }
    if ttl.as_ref().is_some_and(|ttl| ttl.0.is_some_and(|ttl| ttl.is_zero())) {
        return Err(Fault::usage("a time of 0 would keep nothing", "say so by --quota 0, or give a longer --ttl"));
    }
    let make = |rule: &mut FolderRule| {
        if let Some(ttl) = ttl {
            // Rounded up to whole seconds.
            rule.ttl_seconds = ttl.0.map(|ttl| ttl.as_millis().div_ceil(1000) as u64);
        }
        if let Some(quota) = quota {
            rule.quota_bytes = quota.0.map(|quota| quota.0);
        }
        if let Some(class) = class {
            rule.set_write_class(class);
        }
    };
    run_change(rule, &RuleChange { pins: false, needs: &|_| Ok(()), make: &make })
}

/// Where new files go, if a flag says so.
fn chosen_class(args: &LimitArgs) -> Option<WriteClass> {
    let given =
        [(args.stage, WriteClass::Staged), (args.scratch, WriteClass::Scratch), (args.direct, WriteClass::Direct)];
    given.into_iter().find_map(|(is_given, class)| is_given.then_some(class))
}

/// Refuses classes of new files for folders that are in no bucket.
fn check_class(class: WriteClass, urls: &[String]) -> Result<(), Fault> {
    let flag = match class {
        WriteClass::Direct => return Ok(()),
        WriteClass::Staged => "--stage",
        WriteClass::Scratch => "--scratch",
    };
    match urls.iter().find(|url| url.starts_with("file:")) {
        None => Ok(()),
        Some(url) => Err(Fault::usage(
            format!("{flag}: {url} is in a directory, and changes of a directory go straight to its files"),
            format!("leave {flag} out, or name a folder of a bucket"),
        )),
    }
}

/// Runs `spurline rules`; exit code 1 when a node did not answer.
///
/// # Errors
/// When the registry can't be reached.
pub fn list_rules(args: RulesArgs) -> Result<ExitCode, Fault> {
    let (nodes, set) =
        RuleNodes::open(required_registry(args.registry.as_ref())?, &args.cache_group, &args.trust.check(false)?)?;
    let told = nodes.query_nodes(None);
    let silent = unreached_nodes(&told);
    let rules: Vec<HeldRule> = set
        .rules
        .iter()
        .map(|rule| {
            let held_bytes = node_answers(&told).map(|node| node.held_bytes(&rule.url)).sum();
            HeldRule { rule: rule.clone(), held_bytes }
        })
        .collect();
    let pinned = node_answers(&told).map(|node| node.pinned_bytes).sum();
    let most = node_answers(&told).map(|node| node.most_pinned_bytes).sum();
    if args.json {
        let out = json!({
            "revision": set.revision, "rules": rules, "pinned_bytes": pinned, "most_pinned_bytes": most,
            "unreached": silent_as_json(&silent),
        });
        anstream::println!("{out}");
    } else {
        if rules.is_empty() {
            anstream::println!("group {} has no rules; spurline pin and spurline limit make some", args.cache_group);
        }
        for HeldRule { rule, held_bytes } in &rules {
            anstream::println!("{}; {} held", rule_words(&set, &rule.url), human_bytes(*held_bytes));
        }
        anstream::println!("{} pinned, of {} that may be", human_bytes(pinned), human_bytes(most));
        for rule in &set.rules {
            if let Some((what, least)) = rule.quota_bytes.and_then(|quota| less_than_a_block(&told, quota)) {
                anstream::eprintln!("{}: {what}; give at least {}", rule.url, human_bytes(least));
            }
        }
        say_unreached(&silent, "");
    }
    Ok(ExitCode::from(u8::from(!silent.is_empty())))
}

/// The registry, or an error that names the flag.
fn required_registry(given: Option<&Registry>) -> Result<&Registry, Fault> {
    given.ok_or_else(|| {
        Fault::usage(
            "rules are kept by the registry of a group, and none is named",
            "give --registry coordinator://HOST:PORT or etcd://HOST:PORT; a mount that runs alone has no rules, its \
             --cache-size is all there is to say",
        )
    })
}

fn run_change(args: &RuleArgs, change: &RuleChange<'_>) -> Result<ExitCode, Fault> {
    let urls = urls_of(&args.path)?;
    let stop = signals::stop_flag(1)?;
    let RulesArgs { registry: given, cache_group, trust, json: as_json } = &args.group;
    let (nodes, set) = RuleNodes::open(required_registry(given.as_ref())?, cache_group, &trust.check(false)?)?;
    let bar = progress_bar(*as_json);
    let (set, told) = apply_change(&nodes, set, &urls, change, &shown_in(&bar), &stop)?;
    // Blocks that are cached already come under the rule too. A folder whose last rule was removed has none to
    // come under.
    let mut failed = Vec::new();
    let mut held = None;
    for url in urls.iter().filter(|url| set.rules.iter().any(|rule| is_within(url, &rule.url))) {
        match nodes.classify_held(url, &told, &shown_in(&bar), &stop) {
            Ok(bytes) => *held.get_or_insert(0) += bytes,
            Err(error) => failed.push(format!("{url}: {error}")),
        }
    }
    bar.finish_and_clear();
    let silent = unreached_nodes(&told);
    let rules: Vec<Value> = urls.iter().map(|url| rule_json(&set, url)).collect();
    if *as_json {
        let out = json!({
            "revision": set.revision, "rules": rules, "held_bytes": held, "failed": failed,
            "unreached": silent_as_json(&silent),
        });
        anstream::println!("{out}");
    } else {
        for url in &urls {
            anstream::println!("{}", rule_words(&set, url));
        }
        if let Some(held) = held {
            let rest = if change.pins { "; spurline load brings what is missing" } else { "" };
            anstream::println!("{} of it held now, all copies together{rest}", human_bytes(held));
        }
        for why in &failed {
            anstream::eprintln!("not all cached blocks are under the rule: {why}; run this again");
        }
        say_unreached(&silent, UNREACHED_NODE_NOTE);
    }
    Ok(ExitCode::from(u8::from(!failed.is_empty())))
}

/// Pins `urls` for a job that loads these folders next.
///
/// # Errors
/// As [`pin_folders`].
pub fn pin_before_load(
    registry: &Registry,
    group: &str,
    trust: &TrustConfig,
    source: &str,
    paths: &[String],
    quiet: bool,
) -> Result<(), Fault> {
    let urls: Vec<String> = paths.iter().map(|path| url_below(source, path.as_bytes())).collect::<Result<_, _>>()?;
    let (nodes, set) = RuleNodes::open(registry, group, trust)?;
    let bar = progress_bar(quiet);
    let stop = Arc::new(AtomicBool::new(false));
    let change = RuleChange { pins: true, needs: &|_| Ok(()), make: &|rule| rule.pin = true };
    let (set, told) = apply_change(&nodes, set, &urls, &change, &shown_in(&bar), &stop)?;
    bar.finish_and_clear();
    if !quiet {
        for url in &urls {
            anstream::println!("{}", rule_words(&set, url));
        }
    }
    say_unreached(&unreached_nodes(&told), UNREACHED_NODE_NOTE);
    Ok(())
}

/// The URLs of paths in a mount of this machine; URLs stay unchanged.
fn urls_of(paths: &[String]) -> Result<Vec<String>, Fault> {
    paths.iter().map(|path| url_of(path)).collect()
}

/// The URL of a path in a mount, or a URL as given, without a slash at the end.
///
/// # Errors
/// With exit code 2 for a text that names neither.
pub fn url_of(path: &str) -> Result<String, Fault> {
    if !path.contains("://")
        && let Ok((located, _)) = locate_path(Path::new(path))
    {
        return url_below(&located.mount.source, &located.below);
    }
    let source: SourceUrl = path
        .parse()
        .map_err(|why| Fault::usage(format!("{path}: {why}"), "name a folder by its URL, or by its path in a mount"))?;
    Ok(source.as_str().trim_end_matches('/').to_owned())
}

/// The URL of a path in a source.
fn url_below(source: &str, path: &[u8]) -> Result<String, Fault> {
    String::from_utf8(url::join_url(source, path)).map_err(|_| {
        Fault::usage(format!("{}: a name that is no UTF-8", path.escape_ascii()), "name the folder above it")
    })
}

fn progress_bar(quiet: bool) -> ProgressBar {
    let hidden = quiet || !crate::jobs::show::is_terminal();
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    ProgressBar::with_draw_target(None, target)
}

/// Shows progress in the bar.
fn shown_in(bar: &ProgressBar) -> impl Fn(String) {
    |text| {
        bar.set_message(text);
        bar.tick();
    }
}

/// Nodes without an answer, and the reasons.
fn unreached_nodes(told: &[NodeAnswer]) -> Vec<(String, String)> {
    told.iter().filter_map(|one| Some((one.member.name.clone(), one.answer.as_ref().err()?.to_string()))).collect()
}

fn silent_as_json(silent: &[(String, String)]) -> Vec<Value> {
    silent.iter().map(|(name, why)| json!({"node": name, "reason": why})).collect()
}

fn say_unreached(silent: &[(String, String)], then: &str) {
    for (name, why) in silent {
        anstream::eprintln!("node {name} does not answer: {why}{then}");
    }
}

/// A folder with the rule in words.
fn rule_words(set: &RuleSet, url: &str) -> String {
    let rule = set.rules.iter().find(|rule| rule.url == url).cloned().unwrap_or_default();
    format!("{url}: {}", describe_rule(&rule))
}

fn rule_json(set: &RuleSet, url: &str) -> Value {
    let rule = set.rules.iter().find(|rule| rule.url == url);
    rule.map_or_else(|| json!({"url": url}), |rule| json!(rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_taken_as_the_nodes_name_it() {
        assert_eq!(url_of("s3://b/train/").unwrap(), "s3://b/train");
        assert_eq!(url_of("/data/./train/").unwrap(), "file:///data/train");
        assert_eq!(url_of("/my data/100%/").unwrap(), "file:///my%20data/100%25");
        assert_eq!(url_below("file:///my%20data", "v \u{e9}".as_bytes()).unwrap(), "file:///my%20data/v%20%C3%A9");
        assert_eq!(url_below("s3://b/", b"v w").unwrap(), "s3://b/v w");
        assert!(url_below("s3://b", b"\xff").is_err());
        assert!(url_of("s4://b").unwrap_err().to_string().contains("unknown scheme"));
    }

    #[test]
    fn only_files_of_buckets_are_staged_or_scratch_data() {
        let bucket = ["s3://b/run".to_owned()];
        let both = ["s3://b/run".to_owned(), "file:///data".to_owned()];
        for (class, flag) in [(WriteClass::Staged, "--stage"), (WriteClass::Scratch, "--scratch")] {
            assert_eq!(check_class(class, &bucket), Ok(()));
            let said = check_class(class, &both).unwrap_err().to_string();
            assert!(said.contains(&format!("{flag}: file:///data is in a directory")), "{said}");
        }
        assert_eq!(check_class(WriteClass::Direct, &both), Ok(()));
    }
}
