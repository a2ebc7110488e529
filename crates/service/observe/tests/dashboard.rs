//! The Grafana dashboard and the alert rules name only metrics that exist, no panel is empty, and each alert says what to do.

use serde_json::Value;
use spurline_types::Stats;
use std::collections::BTreeSet;
use std::path::Path;

/// The metrics the page serves.
fn existing() -> BTreeSet<String> {
    let text = Stats::default().to_prometheus();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.filter_map(|rest| rest.split(' ').next().map(str::to_owned)).collect()
}

/// The names of metrics in an expression.
fn named(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("spurline_"))
}

#[test]
fn every_metric_of_the_dashboard_exists() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../deploy/grafana/spurline.json");
    let dashboard: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let existing = existing();
    let mut seen = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "two panels have the id of '{title}'");
        if panel["type"] == "row" {
            continue;
        }
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty() && panel["fieldConfig"]["defaults"]["unit"].is_string(), "'{title}' is empty");
        for target in targets {
            let expression = target["expr"].as_str().unwrap();
            let mut any = false;
            for metric in named(expression) {
                assert!(existing.contains(metric), "panel '{title}' names {metric}, which does not exist");
                seen.insert(metric.to_owned());
                any = true;
            }
            assert!(any, "panel '{title}' has an expression without a metric: {expression}");
            let depth = expression.chars().fold(0i32, |d, c| d + i32::from(c == '(') - i32::from(c == ')'));
            assert_eq!(depth, 0, "{expression}");
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        for metric in named(variable["definition"].as_str().unwrap_or_default()) {
            assert!(existing.contains(metric), "a variable names {metric}, which does not exist");
        }
    }
    for metric in ["running", "files_done", "bytes_done"] {
        assert!(seen.contains(&format!("spurline_jobs_{metric}")), "{metric} of jobs is not on the dashboard");
    }
    for metric in ["clients", "read_bytes_total", "stale_handles_total"] {
        assert!(seen.contains(&format!("spurline_export_{metric}")), "{metric} of exports is not on the dashboard");
    }
    for metric in ["unsaved_objects", "unsaved_bytes", "oldest_unsaved_s", "size_bytes"] {
        assert!(seen.contains(&format!("spurline_stage_{metric}")), "{metric} of staged files is not on the dashboard");
    }
    // What `spurline status` shows is there too.
    for metric in ["used_bytes", "capacity_bytes", "hit_bytes_total"] {
        assert!(seen.contains(&format!("spurline_blockcache_{metric}")), "{metric} is not on the dashboard");
    }
}

#[test]
fn every_metric_of_the_alert_rules_exists() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../deploy/prometheus/alerts.yml");
    let text = std::fs::read_to_string(file).unwrap();
    let rules: Value = serde_saphyr::from_str(&text).unwrap();
    let existing = existing();
    let mut alerts = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for rule in rules["groups"][0]["rules"].as_array().unwrap() {
        let alert = rule["alert"].as_str().unwrap();
        assert!(alerts.insert(alert), "two alerts are named {alert}");
        assert!(["critical", "warning"].contains(&rule["labels"]["severity"].as_str().unwrap()), "{alert}");
        let summary = rule["annotations"]["summary"].as_str().unwrap();
        assert!(summary.contains("$labels.instance") && rule["annotations"]["description"].is_string(), "{alert}");
        for metric in named(rule["expr"].as_str().unwrap()) {
            assert!(existing.contains(metric), "{alert} names {metric}, which does not exist");
            seen.insert(metric);
        }
    }
    assert_eq!((alerts.len(), seen.len()), (13, 12), "one alert has no metric but 'up': {seen:?}");
    // The document lists them.
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/packages.md");
    let document = std::fs::read_to_string(document).unwrap();
    for metric in seen {
        assert!(document.contains(&format!("`{metric}`")), "{metric} is not in docs/packages.md");
    }
}
