//! The rule of each value beyond the type of the default: for the check of a person's values and for the chart's schema.

use spurline_config::{CacheSize, Registry, SourceUrl};
use spurline_types::Size;
use std::net::IpAddr;

/// Whether a text is right; else the fault and, after a semicolon, the right form.
pub(crate) type TextCheck = fn(&str) -> Result<(), String>;

/// What a value has to be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ValueRule {
    Words(&'static [&'static str]),
    /// A whole number in a range.
    Number(u64, u64),
    Text(TextCheck),
    /// A text, which may be empty.
    TextOrEmpty(TextCheck),
    /// A list of texts.
    Texts(TextCheck),
    /// A list of maps, as in Kubernetes.
    Objects,
}

/// The rule of a value that is a text, a number or a list; `None` for others.
pub(crate) fn rule_of(path: &str) -> Option<ValueRule> {
    use ValueRule::{Number, Objects, Text, TextOrEmpty, Texts, Words};
    Some(match path {
        "imagePullPolicy" => Words(&["Always", "IfNotPresent", "Never"]),
        "nodes.kind" => Words(&["DaemonSet", "StatefulSet"]),
        "networkAttachment.type" => Words(&["macvlan", "ipvlan", "ipoib"]),
        "coordinator.port" | "nodes.port" => Number(1, 65535),
        "nodes.replicas" => Number(0, 100_000),
        "namespace" => Text(namespace),
        "image" | "csi.registrarImage" | "csi.provisionerImage" => Text(image),
        "imagePullSecrets" => Texts(object_name),
        "storageClass.name" => Text(object_name),
        "groupSecret" | "nodes.credentialsSecret" | "storageClass.secret" | "nodes.priorityClassName" => {
            TextOrEmpty(object_name)
        }
        "registry" => TextOrEmpty(registry),
        "cacheGroup" => Text(word),
        "coordinator.storage" => TextOrEmpty(quantity),
        "coordinator.memory" | "nodes.memory" => Text(quantity),
        "csi.memory" => Text(mount_memory),
        "nodes.bufferSize" => Text(buffer_size),
        "nodes.cacheSize" | "csi.cacheSize" => Text(cache_size),
        "nodes.stageSize" => TextOrEmpty(stage_size),
        "nodes.sources" => Texts(source),
        "storageClass.source" => Text(source),
        "nodes.endpointUrl" => TextOrEmpty(endpoint),
        "nodes.cacheDirs" => Texts(cache_dir),
        "nodes.tolerations" => Objects,
        "nodes.rdmaNetwork" => TextOrEmpty(interfaces),
        "nodes.rdmaResource" | "test.rdmaResource" => TextOrEmpty(resource),
        "csi.kubeletDir" | "devicePlugin.kubeletDir" => Text(directory),
        // Options of 'spurline mount', whose parser is the program's.
        "storageClass.mountOptions" => Texts(word),
        "devicePlugin.memlock" => TextOrEmpty(locked_memory),
        "networkAttachment.master" => Text(interface),
        "networkAttachment.subnet" => Text(subnet),
        _ => return None,
    })
}

fn check(is_right: bool, text: &str, wrong: &str) -> Result<(), String> {
    if is_right { Ok(()) } else { Err(format!("'{text}' is {wrong}")) }
}

/// A name of DNS, whose parts between dots have lower-case letters, digits and hyphens.
fn is_name(text: &str) -> bool {
    text.len() <= 253
        && text.split('.').all(|part| {
            let inner = part.chars().all(|c| c == '-' || c.is_ascii_lowercase() || c.is_ascii_digit());
            inner && is_label_end(part.chars().next()) && is_label_end(part.chars().last())
        })
}

fn is_label_end(c: Option<char>) -> bool {
    c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
}

fn namespace(text: &str) -> Result<(), String> {
    let is_right = is_name(text) && text.len() <= 63 && !text.contains('.');
    check(is_right, text, "no name of a namespace; write at most 63 lower-case letters, digits and hyphens")
}

fn object_name(text: &str) -> Result<(), String> {
    check(is_name(text), text, "no name of an object; write lower-case letters, digits, hyphens and dots")
}

fn image(text: &str) -> Result<(), String> {
    let is_right = !text.is_empty() && !text.contains(char::is_whitespace);
    check(is_right, text, "no image; write REGISTRY/NAME:TAG, such as registry.example.com/spurline:0.1.0")
}

fn word(text: &str) -> Result<(), String> {
    check(!text.is_empty() && !text.contains(char::is_whitespace), text, "no word; write one without blanks")
}

fn registry(text: &str) -> Result<(), String> {
    text.parse::<Registry>().map(drop)
}

/// The bytes of a quantity of Kubernetes: a number, and a unit or a power of ten.
pub(crate) fn bytes_of(quantity: &str) -> Option<u64> {
    let end = quantity.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(quantity.len());
    let (number, unit) = quantity.split_at(end);
    let scale = match unit {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024f64.powi(2),
        "Gi" => 1024f64.powi(3),
        "Ti" => 1024f64.powi(4),
        "Pi" => 1024f64.powi(5),
        "Ei" => 1024f64.powi(6),
        power => 10f64.powi(power.strip_prefix(['e', 'E'])?.parse().ok()?),
    };
    let bytes = number.parse::<f64>().ok()? * scale;
    (bytes >= 1.0).then_some(bytes as u64)
}

fn quantity(text: &str) -> Result<(), String> {
    check(bytes_of(text).is_some(), text, "no quantity of Kubernetes; write 512Mi, 3Gi or 1Ti")
}

/// A limit of mount pods, which the driver reads as a size.
fn mount_memory(text: &str) -> Result<(), String> {
    quantity(text)?;
    let is_size = text.strip_suffix('i').unwrap_or(text).parse::<Size>().is_ok();
    check(is_size, text, "no size of the driver; write 512Mi, 3Gi or 1Ti")
}

fn buffer_size(text: &str) -> Result<(), String> {
    text.parse::<Size>().map(drop).map_err(|why| why.to_string())
}

fn stage_size(text: &str) -> Result<(), String> {
    let is_size = text.parse::<Size>().is_ok_and(|size| size.bytes() > 0);
    check(is_size, text, "no size, such as 500G")
}

fn cache_size(text: &str) -> Result<(), String> {
    text.parse::<CacheSize>().map(drop)
}

fn source(text: &str) -> Result<(), String> {
    let wrong = "no URL and no absolute directory; write s3://BUCKET, gs://BUCKET, az://CONTAINER or /DIR";
    check(text.contains("://") || text.starts_with('/'), text, wrong)?;
    text.parse::<SourceUrl>().map(drop)
}

fn endpoint(text: &str) -> Result<(), String> {
    let is_right = ["http://", "https://"].iter().any(|scheme| text.len() > scheme.len() && text.starts_with(scheme));
    check(is_right, text, "no address of a server; write http://HOST:PORT or https://HOST")
}

fn directory(text: &str) -> Result<(), String> {
    check(text.starts_with('/'), text, "no absolute directory; begin it with /")
}

fn cache_dir(text: &str) -> Result<(), String> {
    let is_right = text.starts_with('/') && text != "/" && !text.contains([':', '*', '?', '[']);
    check(is_right, text, "no directory of one disk; write a list of absolute directories without patterns")
}

fn is_interface(name: &str) -> bool {
    !name.is_empty() && name.len() <= 15 && !name.contains(['/', ',']) && !name.contains(char::is_whitespace)
}

fn interface(text: &str) -> Result<(), String> {
    check(is_interface(text), text, "no name of an interface; write one of at most 15 characters, such as eth1")
}

fn interfaces(text: &str) -> Result<(), String> {
    let names: Vec<&str> = text.split(':').collect();
    let is_right = names.iter().all(|name| is_interface(name) && names.iter().filter(|n| n == &name).count() == 1);
    check(is_right, text, "no list of interfaces; write each name once, with colons between: ib0:ib1")
}

fn resource(text: &str) -> Result<(), String> {
    let is_right = text.split_once('/').is_some_and(|(prefix, name)| is_name(prefix) && !name.is_empty());
    check(is_right, text, "no resource; write PREFIX/NAME, such as rdma/ib")
}

fn locked_memory(text: &str) -> Result<(), String> {
    match text {
        "unlimited" => Ok(()),
        size => size.parse::<Size>().map(drop).map_err(|e| format!("{e}, or unlimited")),
    }
}

/// A subnet, or a part, in the form of whereabouts.
fn subnet(text: &str) -> Result<(), String> {
    let is_right = text.split_once('/').is_some_and(|(addresses, bits)| {
        let (first, last) = addresses.split_once('-').unwrap_or((addresses, addresses));
        let (Ok(first), Ok(last)) = (first.parse::<IpAddr>(), last.parse::<IpAddr>()) else { return false };
        let most = if first.is_ipv4() { 32 } else { 128 };
        let is_range = first.is_ipv4() == last.is_ipv4() && first <= last;
        is_range && bits.parse::<u8>().is_ok_and(|bits| bits <= most)
    });
    let wrong =
        "no subnet; write ADDRESS/BITS, such as 192.168.100.0/24, or a part of one: 192.168.100.10-192.168.100.99/24";
    check(is_right, text, wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_those_of_kubernetes() {
        let right = [
            ("1e10", 10_000_000_000),
            ("1E3", 1000),
            ("12e+1", 120),
            ("2500e-1", 250),
            ("1E", 1_000_000_000_000_000_000),
        ];
        for (text, bytes) in
            right.into_iter().chain([("1Ei", 1 << 60), ("1.5Gi", 3 << 29), (".5Ki", 512), ("4000m", 4)])
        {
            assert_eq!(bytes_of(text), Some(bytes), "{text}");
        }
        for text in ["", "e3", "1e", "1e1.5", "1K", "1GiB", "0", "1e-3", "-1", "1 Gi"] {
            assert_eq!(bytes_of(text), None, "{text}");
        }
    }

    #[test]
    fn subnets_and_parts_of_them() {
        for text in ["10.0.0.0/24", "10.0.0.1-10.0.0.100/24", "fd00::/64", "fd00::10-fd00::ff/64"] {
            assert_eq!(subnet(text), Ok(()), "{text}");
        }
        for text in [
            "10.0.0.1-10.0.0.100",
            "10.0.0.9-10.0.0.1/24",
            "10.0.0.1-fd00::1/64",
            "10.0.0.1-/24",
            "10.0.0.1-10.0.0.2-10.0.0.3/24",
        ] {
            assert!(subnet(text).is_err(), "{text}");
        }
    }
}
