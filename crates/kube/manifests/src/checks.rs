//! The check of values: each by a rule, and contradictions. Knows no object.

use crate::rules::{TextCheck, ValueRule, bytes_of, rule_of};
use crate::values::{ClusterValues, LABELS, kind};
use serde_json::Value;
use spurline_config::Fault;
use spurline_config::budget::OUTSIDE;
use spurline_types::Size;

/// Checks values.
///
/// # Errors
/// When a value is wrong, or two contradict each other.
pub(crate) fn check_values(values: &ClusterValues) -> Result<(), Fault> {
    check_each("", values.tree())?;
    check_nodes(values)?;
    if !values.text("devicePlugin.memlock").is_empty() && !values.is_on("devicePlugin.useCdi") {
        return Err(Fault::usage(
            "devicePlugin.memlock is set and devicePlugin.useCdi is false",
            "set devicePlugin.useCdi to true: the limit is raised by a hook of CDI",
        ));
    }
    let without = ["csi.enabled", "storageClass.enabled"].into_iter().find(|path| !values.is_on(path));
    match without {
        Some(path) if values.is_on("test.enabled") => Err(Fault::usage(
            format!("test.enabled is true and {path} is false: the claim of the test pods stays Pending"),
            format!("set {path} to true"),
        )),
        _ => Ok(()),
    }
}

fn check_nodes(values: &ClusterValues) -> Result<(), Fault> {
    if !values.text("nodes.rdmaResource").is_empty() && values.text("nodes.rdmaNetwork").is_empty() {
        return Err(Fault::usage(
            "nodes.rdmaResource is set and nodes.rdmaNetwork is empty: nodes would use TCP",
            "set nodes.rdmaNetwork to the interfaces, with colons between: ib0:ib1",
        ));
    }
    if !values.is_on("nodes.enabled") {
        return Ok(());
    }
    if !values.is_on("coordinator.enabled") && values.text("registry").is_empty() {
        return Err(Fault::usage(
            "nodes.enabled is true and there is no registry: coordinator.enabled is false and registry is empty",
            "set coordinator.enabled to true, or registry to etcd://HOST:2379",
        ));
    }
    let list = |path: &str| values.find(path).and_then(Value::as_array).cloned().unwrap_or_default();
    if list("nodes.sources").is_empty() {
        return Err(Fault::usage(
            "nodes.sources is empty",
            "list the buckets that nodes may read, such as s3://datasets",
        ));
    }
    let dirs = list("nodes.cacheDirs");
    if dirs.is_empty() || dirs.iter().enumerate().any(|(n, dir)| dirs[..n].contains(dir)) {
        return Err(Fault::usage(
            "nodes.cacheDirs is empty, or names a directory twice",
            "list one directory of each disk, such as /nvme0/spurline",
        ));
    }
    if !values.text("nodes.stageSize").is_empty() && !values.is_on("nodes.writable") {
        return Err(Fault::usage(
            "nodes.stageSize is set and nodes.writable is false: nodes that take no changes keep no staged files",
            "set nodes.writable to true, with keys that may write, or nodes.stageSize to \"\"",
        ));
    }
    let buffer = values.text("nodes.bufferSize");
    let memory = values.text("nodes.memory");
    let needed = buffer.parse::<Size>().map_or(0, Size::bytes).saturating_add(OUTSIDE);
    if bytes_of(memory).is_some_and(|memory| memory < needed) {
        return Err(Fault::usage(
            format!("nodes.memory is {memory}, which does not hold nodes.bufferSize, {buffer}, and 64 MiB outside it"),
            "set nodes.memory to a third more than nodes.bufferSize",
        ));
    }
    Ok(())
}

/// Checks the values at and below a path by the rules.
fn check_each(path: &str, value: &Value) -> Result<(), Fault> {
    if let Some(rule) = rule_of(path) {
        return check_rule(path, value, rule);
    }
    let Value::Object(keys) = value else { return Ok(()) };
    let last = path.rsplit('.').next().unwrap_or_default();
    for (key, below) in keys {
        let at = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if !LABELS.contains(&last) {
            check_each(&at, below)?;
        } else if !below.is_string() {
            let what = format!("{at} is {}, and labels are texts", kind(below));
            return Err(Fault::usage(what, format!("write it in quotes: {key}: \"{below}\"")));
        }
    }
    Ok(())
}

fn check_rule(path: &str, value: &Value, rule: ValueRule) -> Result<(), Fault> {
    match rule {
        ValueRule::Words(words) => match value.as_str() {
            Some(word) if words.contains(&word) => Ok(()),
            _ => {
                let (last, others) = words.split_last().unwrap_or((&"", &[]));
                let what = format!("{path} is '{}'", value.as_str().unwrap_or_default());
                Err(Fault::usage(what, format!("write {} or {last}", others.join(", "))))
            }
        },
        ValueRule::Number(least, most) => match value.as_u64() {
            Some(number) if (least..=most).contains(&number) => Ok(()),
            _ => {
                Err(Fault::usage(format!("{path} is {value}"), format!("write a whole number from {least} to {most}")))
            }
        },
        ValueRule::TextOrEmpty(_) if value == "" => Ok(()),
        ValueRule::Text(check) | ValueRule::TextOrEmpty(check) => {
            check_text(path, value.as_str().unwrap_or_default(), check)
        }
        ValueRule::Texts(check) => check_texts(path, value, check),
        ValueRule::Objects => match value.as_array().into_iter().flatten().find(|item| !item.is_object()) {
            Some(item) => Err(Fault::usage(
                format!("{path} has {} in its list", kind(item)),
                "list maps, such as {key: nvidia.com/gpu, operator: Exists}",
            )),
            None => Ok(()),
        },
    }
}

fn check_text(path: &str, text: &str, check: TextCheck) -> Result<(), Fault> {
    check(text).map_err(|why| {
        let (what, remedy) = why.split_once("; ").unwrap_or((&why, ""));
        Fault::usage(format!("{path}: {what}"), remedy)
    })
}

fn check_texts(path: &str, value: &Value, check: TextCheck) -> Result<(), Fault> {
    for item in value.as_array().into_iter().flatten() {
        match item.as_str() {
            Some(text) => check_text(path, text, check)?,
            None => return Err(Fault::usage(format!("{path} has {} in its list", kind(item)), "list texts")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths of texts, numbers and lists.
    fn leaves(path: &str, value: &Value, found: &mut Vec<String>) {
        let last = path.rsplit('.').next().unwrap_or_default();
        match value {
            Value::Object(keys) if !LABELS.contains(&last) && path != "devicePlugin.config" => {
                for (key, below) in keys {
                    leaves(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, below, found);
                }
            }
            Value::Object(_) | Value::Bool(_) => {}
            _ => found.push(path.to_owned()),
        }
    }

    #[test]
    fn every_value_has_a_rule_and_the_defaults_keep_them() {
        let values = ClusterValues::defaults().unwrap();
        let mut paths = Vec::new();
        leaves("", values.tree(), &mut paths);
        let without: Vec<_> = paths.iter().filter(|path| rule_of(path).is_none()).collect();
        assert!(paths.len() > 30 && without.is_empty(), "{without:?}");
        check_values(&values).unwrap();
    }

    #[test]
    fn wrong_contents_are_refused_with_their_key() {
        for (setting, says) in [
            ("nodes.port=99999", "nodes.port is 99999; write a whole number from 1 to 65535"),
            ("nodes.port=-1", "nodes.port is -1"),
            ("nodes.replicas=3.5", "nodes.replicas is 3.5"),
            ("namespace=", "namespace: '' is no name"),
            ("namespace=Foo_Bar", "'Foo_Bar' is no name of a namespace"),
            ("image=", "image: '' is no image"),
            ("imagePullPolicy=Sometimes", "imagePullPolicy is 'Sometimes'; write Always, IfNotPresent or Never"),
            ("imagePullSecrets=[{name: a}]", "imagePullSecrets has a map in its list"),
            ("groupSecret=a/b", "groupSecret: 'a/b'"),
            ("csi.memory=lots", "csi.memory: 'lots' is no quantity"),
            ("csi.memory=1e10", "csi.memory: '1e10' is no size of the driver; write 512Mi"),
            ("nodes.memory=1Gi", "nodes.memory is 1Gi, which does not hold nodes.bufferSize, 2G"),
            ("nodes.bufferSize=huge", "nodes.bufferSize: 'huge' is not a size"),
            ("nodes.cacheSize=8192", "did you mean 8192M?"),
            ("nodes.cacheDirs=[]", "nodes.cacheDirs is empty"),
            ("nodes.cacheDirs=[/a, /a]", "names a directory twice"),
            ("nodes.cacheDirs=[relative]", "'relative' is no directory of one disk"),
            ("nodes.cacheDirs=['/a:/b']", "'/a:/b' is no directory of one disk"),
            ("nodes.sources=[datasets]", "nodes.sources: 'datasets' is no URL"),
            ("nodes.sources=[]", "nodes.sources is empty"),
            ("nodes.tolerations=[all]", "nodes.tolerations has a text in its list"),
            ("nodes.nodeSelector={disk: 1}", "write it in quotes: disk: \"1\""),
            ("nodes.rdmaNetwork=ib0:ib0", "write each name once"),
            ("nodes.rdmaResource=rdma/ib", "nodes.rdmaNetwork is empty"),
            ("nodes.endpointUrl=minio:9000", "no address of a server"),
            ("storageClass.source=nonsense", "'nonsense' is no URL"),
            ("storageClass.source=s4://b", "did you mean s3://?"),
            ("registry=foo", "registry: 'foo' is no registry"),
            ("networkAttachment.subnet=foo", "'foo' is no subnet"),
            ("networkAttachment.subnet=10.0.0.0/33", "no subnet"),
            ("networkAttachment.type=bridge", "networkAttachment.type is 'bridge'"),
            ("nodes.kind=Deployment", "write DaemonSet or StatefulSet"),
            ("devicePlugin.memlock=unlimited", "devicePlugin.useCdi is false"),
            ("coordinator.enabled=false", "there is no registry"),
        ] {
            let values = ClusterValues::defaults().unwrap().with_setting(setting).unwrap();
            let said = check_values(&values).unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains('\n'), "{setting}: {said}");
        }
        for setting in ["nodes.replicas=0", "nodes.memory=1e10", "networkAttachment.subnet=10.0.0.1-10.0.0.100/24"] {
            check_values(&ClusterValues::defaults().unwrap().with_setting(setting).unwrap()).unwrap();
        }
        let values = ClusterValues::defaults().unwrap().with_setting("test.enabled=true").unwrap();
        let said = check_values(&values.with_setting("csi.enabled=false").unwrap()).unwrap_err().to_string();
        assert!(said.contains("the claim of the test pods stays Pending"), "{said}");
    }
}
