//! Why a process that answers does not work as it should, from its status. It sends no query and prints nothing.

use serde_json::Value;

/// The state of a process that works as it should.
pub const STATE_UP: &str = "up";
/// The state of a process that answers and has [`degraded_reasons`].
const STATE_DEGRADED: &str = "degraded";

/// What is wrong, one sentence for each disk, node, registry and source; empty if nothing is.
pub fn degraded_reasons(status: &Value) -> Vec<String> {
    let mut reasons = Vec::new();
    for disk in status["disks"].as_array().into_iter().flatten() {
        let state = text_of(disk, "state");
        if state != "normal" {
            reasons.push(format!("cache disk {} is {state}{}", text_of(disk, "path"), reason_of(disk)));
        }
    }
    for peer in status["peers"].as_array().into_iter().flatten() {
        if peer["state"] == "down" {
            reasons.push(format!("node {} is down{}", text_of(peer, "address"), reason_of(peer)));
        }
    }
    let group = &status["group"];
    if group["state"] == "lost" {
        reasons.push(format!("registry {} is lost{}", text_of(group, "registry"), reason_of(group)));
    }
    for (source, error) in status["origin_errors"].as_object().into_iter().flatten() {
        reasons.push(format!("{source}: {}", error.as_str().unwrap_or_default()));
    }
    reasons
}

/// The state of a process by its status and its [`degraded_reasons`].
pub fn state_with(status: &Value, reasons: &[String]) -> String {
    match status["state"].as_str() {
        None | Some(STATE_UP) if reasons.is_empty() => STATE_UP.to_owned(),
        None | Some(STATE_UP) => STATE_DEGRADED.to_owned(),
        Some(other) => other.to_owned(),
    }
}

fn text_of<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or("?")
}

fn reason_of(value: &Value) -> String {
    match value["reason"].as_str() {
        None | Some("") => String::new(),
        Some(reason) => format!(": {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_wrong_is_named_with_its_reason() {
        let well = json!({
            "disks": [{"path": "/a", "state": "normal", "reason": ""}],
            "peers": [{"address": "n1:7000", "state": "up"}, {"address": "n2:7000", "state": "unknown"}],
            "group": {"registry": "etcd://h:1", "state": "up"},
        });
        assert_eq!((degraded_reasons(&well).len(), state_with(&well, &[]).as_str()), (0, "up"));
        let ill = json!({
            "state": "up",
            "disks": [{"path": "/a", "state": "unstable", "reason": "3 reads failed"}],
            "peers": [{"address": "n1:7000", "state": "down", "reason": ""}],
            "group": {"registry": "etcd://h:1", "state": "lost", "reason": "no answer"},
            "origin_errors": {"s3://b": "no route"},
        });
        let reasons = degraded_reasons(&ill);
        assert_eq!(
            reasons,
            [
                "cache disk /a is unstable: 3 reads failed",
                "node n1:7000 is down",
                "registry etcd://h:1 is lost: no answer",
                "s3://b: no route",
            ]
        );
        assert_eq!(state_with(&ill, &reasons), "degraded");
        assert_eq!(state_with(&json!({"state": "origin does not respond"}), &reasons), "origin does not respond");
    }
}
