//! The configuration of the device plugin: the file of the reference plugin, the rules, and warnings where the reference is
//! silent. Reads no node.
//!
//! The reference is Mellanox/k8s-rdma-shared-dev-plugin. The parser there (Go's `encoding/json`) ignores the case of keys and
//! unknown keys, and merges the objects of repeated keys; of other repeated values the last counts.

use crate::json_tree::JsonNode;
use spurline_config::values::nearest_word;
use spurline_fabric::finding::id;
use spurline_fabric::{HostFinding, Severity};
use std::collections::BTreeMap;
use std::time::Duration;

/// Prefix of resources without a prefix.
const DEFAULT_PREFIX: &str = "rdma";
/// Time between two scans of the node, where the file names none.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(60);
/// Longest time between two scans; a longer time has no use, and a point in time that far away may not exist.
const MAX_INTERVAL: Duration = Duration::from_secs(365 * 86_400);
/// kubelet's limit of a resource's name without the prefix.
pub(crate) const MAX_RESOURCE_NAME: usize = 63;
/// The kernel's limit of an interface's name.
const MAX_INTERFACE_NAME: usize = 15;

const NIC_CLUSTER_POLICY_REMEDY: &str = "give the text of its field: kubectl get nicclusterpolicy NAME -o \
                                         jsonpath='{.spec.rdmaSharedDevicePlugin.config}'";

const TOP_KEYS: [&str; 2] = ["periodicUpdateInterval", "configList"];
const ENTRY_KEYS: [&str; 6] = ["resourceName", "resourcePrefix", "rdmaHcaMax", "devices", "selectors", "extraDevices"];

/// A selector of HCAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelectorKey {
    /// PCI vendor ids.
    Vendors,
    /// PCI device ids.
    DeviceIds,
    /// Drivers of PCI functions.
    Drivers,
    /// Interface names.
    IfNames,
    /// `infiniband` or `ether`.
    LinkTypes,
}

impl SelectorKey {
    /// All, in the order of the reference.
    pub const ALL: [SelectorKey; 5] = [
        SelectorKey::Vendors,
        SelectorKey::DeviceIds,
        SelectorKey::Drivers,
        SelectorKey::IfNames,
        SelectorKey::LinkTypes,
    ];

    /// The key in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            SelectorKey::Vendors => "vendors",
            SelectorKey::DeviceIds => "deviceIDs",
            SelectorKey::Drivers => "drivers",
            SelectorKey::IfNames => "ifNames",
            SelectorKey::LinkTypes => "linkTypes",
        }
    }
}

/// The selectors of an entry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceSelectors {
    lists: [Vec<String>; 5],
}

impl DeviceSelectors {
    /// The values of a selector; none means an unused selector.
    pub fn values(&self, key: SelectorKey) -> &[String] {
        &self.lists[key as usize]
    }

    /// The same selectors, with other values for a key.
    pub fn with_values(mut self, key: SelectorKey, values: Vec<String>) -> Self {
        self.lists[key as usize] = values;
        self
    }

    /// Whether no selector has a value.
    pub fn is_empty(&self) -> bool {
        self.lists.iter().all(Vec::is_empty)
    }
}

/// Device nodes that a pod gets besides `uverbsN` and `rdma_cm`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExtraDevices {
    /// `umadN`: management datagrams, for diagnostic programs.
    pub umad: bool,
    /// `issmN`: the right to be a subnet manager.
    pub issm: bool,
}

/// A resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceConfig {
    /// The name, without prefix.
    pub name: String,
    /// The prefix.
    pub prefix: String,
    /// Number of slots, over all HCAs.
    pub slots: u32,
    /// The HCAs.
    pub selectors: DeviceSelectors,
    /// Further device nodes.
    pub extra: ExtraDevices,
}

impl ResourceConfig {
    /// The name that pods request, `rdma/ib`.
    pub fn resource(&self) -> String {
        format!("{}/{}", self.prefix, self.name)
    }
}

/// A valid configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginConfig {
    /// Time between two scans of the node; `None` for a single scan at start.
    pub update_interval: Option<Duration>,
    /// The resources.
    pub resources: Vec<ResourceConfig>,
}

/// The result of reading a configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigReading {
    /// The configuration; `None` when a finding is an error.
    pub config: Option<PluginConfig>,
    /// Faults, and values that are probably not meant.
    pub findings: Vec<HostFinding>,
}

/// Reads a configuration; `file` is the name in findings.
pub fn read_config(text: &str, file: &str) -> ConfigReading {
    let mut reader = ConfigReader { file, findings: Vec::new(), named: BTreeMap::new() };
    let config = reader.read_text(text);
    let is_valid = reader.findings.iter().all(|f| f.severity != Severity::Error);
    ConfigReading { config: config.filter(|_| is_valid), findings: reader.findings }
}

struct ConfigReader<'a> {
    file: &'a str,
    findings: Vec<HostFinding>,
    /// Entries by resource name.
    named: BTreeMap<String, Vec<(usize, String)>>,
}

impl ConfigReader<'_> {
    fn add(
        &mut self,
        id: &'static str,
        severity: Severity,
        subject: &str,
        evidence: String,
        remedy: impl Into<String>,
    ) {
        self.findings.push(HostFinding::new(id, severity, subject, evidence, remedy));
    }

    fn read_text(&mut self, text: &str) -> Option<PluginConfig> {
        let file = self.file;
        if text.starts_with('\u{feff}') {
            let evidence = "the file begins with a byte order mark".to_owned();
            self.add(
                id::K8S_CONFIG_FILE,
                Severity::Error,
                file,
                evidence,
                "store it as UTF-8 without a byte order mark",
            );
            return None;
        }
        let root: JsonNode = match serde_json::from_str(text) {
            Ok(root) => root,
            Err(error) => {
                let remedy = syntax_remedy(text);
                self.add(id::K8S_CONFIG_FILE, Severity::Error, file, format!("it is not JSON: {error}"), remedy);
                return None;
            }
        };
        let JsonNode::Object(entries) = root else {
            let evidence = format!("it holds {}, not an object", root.kind());
            let remedy = "begin with {\"configList\": [{\"resourceName\": …}]}";
            self.add(id::K8S_CONFIG_FILE, Severity::Error, file, evidence, remedy);
            return None;
        };
        if let Some((evidence, remedy)) = foreign_object(&entries) {
            self.add(id::K8S_CONFIG_FILE, Severity::Error, file, evidence.to_owned(), remedy);
            return None;
        }
        let mut fields = self.fields(file, entries, &TOP_KEYS);
        let update_interval = self.interval(fields.remove("periodicUpdateInterval"));
        let list = match fields.remove("configList") {
            Some(JsonNode::Array(list)) if !list.is_empty() => list,
            None | Some(JsonNode::Null | JsonNode::Array(_)) => {
                let evidence = "configList is missing or empty: the reference ends with an error".to_owned();
                self.add(id::K8S_CONFIG_FILE, Severity::Error, file, evidence, "`spurline k8s discover` prints one");
                return None;
            }
            Some(other) => {
                let evidence = format!("configList is {}, not a list", other.kind());
                self.add(id::K8S_CONFIG_FILE, Severity::Error, file, evidence, "write \"configList\": [{…}]");
                return None;
            }
        };
        let mut resources = Vec::new();
        for (index, entry) in list.into_iter().enumerate() {
            resources.extend(self.entry(index, entry));
        }
        self.check_unique();
        Some(PluginConfig { update_interval, resources })
    }

    /// The known fields by their proper name. Keys match in any case; repeated fields are merged as in Go.
    fn fields(
        &mut self,
        subject: &str,
        entries: Vec<(String, JsonNode)>,
        known: &'static [&'static str],
    ) -> BTreeMap<&'static str, JsonNode> {
        let mut fields = BTreeMap::new();
        for (key, value) in entries {
            let Some(proper) = known.iter().copied().find(|k| k.eq_ignore_ascii_case(&key)) else {
                let remedy = match nearest_key(&key, known) {
                    Some(near) => format!("did you mean \"{near}\"?"),
                    None => format!("the keys here are {}", known.join(", ")),
                };
                let evidence = format!("the key \"{key}\" is not known, and the reference ignores it");
                self.add(id::K8S_CONFIG_KEY, Severity::Warning, subject, evidence, remedy);
                continue;
            };
            let Some(first) = fields.remove(proper) else {
                fields.insert(proper, value);
                continue;
            };
            let (both, how) = merge_repeated(first, value);
            fields.insert(proper, both);
            let evidence = format!("\"{proper}\" is given twice: {how}");
            self.add(id::K8S_CONFIG_KEY, Severity::Warning, subject, evidence, "write it once");
        }
        fields
    }

    fn interval(&mut self, value: Option<JsonNode>) -> Option<Duration> {
        let file = self.file;
        match value {
            None | Some(JsonNode::Null) => Some(DEFAULT_INTERVAL),
            Some(JsonNode::Integer(0)) => {
                let evidence = "periodicUpdateInterval is 0: HCAs that appear later are not found".to_owned();
                let remedy = "leave the key out for a scan every 60 s";
                self.add(id::K8S_CONFIG_KEY, Severity::Info, file, evidence, remedy);
                None
            }
            Some(JsonNode::Integer(seconds @ 1..)) => {
                let interval = Duration::from_secs(seconds.unsigned_abs());
                if interval > MAX_INTERVAL {
                    let evidence =
                        format!("periodicUpdateInterval is {seconds} s: more than a year, which counts instead");
                    let remedy = "leave the key out for a scan every 60 s, or write 0 for none";
                    self.add(id::K8S_CONFIG_KEY, Severity::Warning, file, evidence, remedy);
                }
                Some(interval.min(MAX_INTERVAL))
            }
            Some(other) => {
                let is_negative = matches!(other, JsonNode::Integer(_));
                let what = if is_negative { "negative" } else { other.kind() };
                let evidence = format!("periodicUpdateInterval is {what}, not a number of seconds");
                self.add(id::K8S_CONFIG_FILE, Severity::Error, file, evidence, "write \"periodicUpdateInterval\": 60");
                None
            }
        }
    }

    fn entry(&mut self, index: usize, entry: JsonNode) -> Option<ResourceConfig> {
        let mut subject = format!("configList[{index}]");
        let JsonNode::Object(entries) = entry else {
            let evidence = format!("it is {}, not an object", entry.kind());
            self.add(id::K8S_CONFIG_FILE, Severity::Error, &subject, evidence, "write {\"resourceName\": …}");
            return None;
        };
        let mut fields = self.fields(&subject, entries, &ENTRY_KEYS);
        let name = self.text(&subject, "resourceName", fields.remove("resourceName"))?;
        let given_prefix = self.text(&subject, "resourcePrefix", fields.remove("resourcePrefix"))?;
        let prefix = if given_prefix.is_empty() { DEFAULT_PREFIX.to_owned() } else { given_prefix };
        if !name.is_empty() {
            subject = format!("{subject} ({prefix}/{name})");
        }
        self.check_name(&subject, &name, &prefix);
        self.named.entry(name.clone()).or_default().push((index, prefix.clone()));
        let slots = self.slots(&subject, fields.remove("rdmaHcaMax"))?;
        let devices = self.texts(&subject, "devices", fields.remove("devices"))?;
        let selectors = self.selectors(&subject, fields.remove("selectors"))?;
        let extra = self.extra(&subject, fields.remove("extraDevices"))?;
        let selectors = self.combine(&subject, devices, selectors);
        self.check_spelling(&subject, &selectors);
        Some(ResourceConfig { name, prefix, slots, selectors, extra })
    }

    /// A string, empty where absent; `None` after an error.
    fn text(&mut self, subject: &str, key: &str, value: Option<JsonNode>) -> Option<String> {
        match value {
            None | Some(JsonNode::Null) => Some(String::new()),
            Some(JsonNode::Text(text)) => Some(text),
            Some(other) => {
                let evidence = format!("{key} is {}, not a string", other.kind());
                self.add(id::K8S_CONFIG_FILE, Severity::Error, subject, evidence, format!("write \"{key}\": \"…\""));
                None
            }
        }
    }

    fn texts(&mut self, subject: &str, key: &str, value: Option<JsonNode>) -> Option<Vec<String>> {
        let items = match value {
            None | Some(JsonNode::Null) => return Some(Vec::new()),
            Some(JsonNode::Array(items)) => items,
            Some(other) => {
                let evidence = format!("{key} is {}, not a list of strings", other.kind());
                let remedy = format!("write \"{key}\": [\"…\"]");
                self.add(id::K8S_CONFIG_FILE, Severity::Error, subject, evidence, remedy);
                return None;
            }
        };
        let mut texts = Vec::new();
        for item in items {
            match item {
                JsonNode::Text(text) => texts.push(text),
                // Go leaves the zero value of a string.
                JsonNode::Null => texts.push(String::new()),
                other => {
                    let evidence = format!("{key} holds {}, not a string", other.kind());
                    let remedy = format!("put quotes around the values of {key}: \"15b3\"");
                    self.add(id::K8S_CONFIG_FILE, Severity::Error, subject, evidence, remedy);
                    return None;
                }
            }
        }
        Some(texts)
    }

    fn selectors(&mut self, subject: &str, value: Option<JsonNode>) -> Option<DeviceSelectors> {
        const RESOURCE_KEYS: [&str; 5] = ["vendors", "deviceIDs", "drivers", "ifNames", "linkTypes"];
        let entries = match value {
            None | Some(JsonNode::Null) => return Some(DeviceSelectors::default()),
            Some(JsonNode::Object(entries)) => entries,
            Some(other) => {
                let evidence = format!("selectors is {}, not an object", other.kind());
                let remedy = "write \"selectors\": {\"vendors\": [\"15b3\"]}";
                self.add(id::K8S_CONFIG_FILE, Severity::Error, subject, evidence, remedy);
                return None;
            }
        };
        let mut fields = self.fields(&format!("{subject} selectors"), entries, &RESOURCE_KEYS);
        let mut selectors = DeviceSelectors::default();
        for key in SelectorKey::ALL {
            let values = self.texts(subject, key.as_str(), fields.remove(key.as_str()))?;
            selectors = selectors.with_values(key, values);
        }
        Some(selectors)
    }

    fn extra(&mut self, subject: &str, value: Option<JsonNode>) -> Option<ExtraDevices> {
        let mut extra = ExtraDevices::default();
        for name in self.texts(subject, "extraDevices", value)? {
            match name.as_str() {
                "umad" => extra.umad = true,
                "issm" => extra.issm = true,
                other => {
                    let evidence = format!("extraDevices names '{other}'");
                    self.add(id::K8S_SELECTOR, Severity::Error, subject, evidence, "it takes \"umad\" and \"issm\"");
                    return None;
                }
            }
        }
        Some(extra)
    }

    fn slots(&mut self, subject: &str, value: Option<JsonNode>) -> Option<u32> {
        let (severity, evidence) = match value {
            Some(JsonNode::Integer(n @ 1..)) => match u32::try_from(n) {
                Ok(n) => return Some(n),
                Err(_) => (Severity::Error, format!("rdmaHcaMax is {n}: too large")),
            },
            None | Some(JsonNode::Null) => {
                (Severity::Warning, "rdmaHcaMax is absent, which means 0: the node advertises no device".to_owned())
            }
            Some(JsonNode::Integer(0)) => {
                (Severity::Warning, "rdmaHcaMax is 0: the node advertises no device".to_owned())
            }
            Some(JsonNode::Integer(n)) => (Severity::Error, format!("rdmaHcaMax is {n}: negative")),
            Some(other) => (Severity::Error, format!("rdmaHcaMax is {}, not a whole number", other.kind())),
        };
        let remedy = "write \"rdmaHcaMax\": N, the most pods of a node that share these HCAs";
        self.add(id::K8S_SLOTS, severity, subject, evidence, remedy);
        (severity == Severity::Warning).then_some(0)
    }

    fn combine(&mut self, subject: &str, devices: Vec<String>, selectors: DeviceSelectors) -> DeviceSelectors {
        match (devices.is_empty(), selectors.is_empty()) {
            (true, true) => {
                let evidence = "it has neither selectors nor devices, or only empty lists".to_owned();
                let remedy = "name HCAs: \"selectors\": {\"vendors\": [\"15b3\"], \"linkTypes\": [\"infiniband\"]}";
                self.add(id::K8S_SELECTOR, Severity::Error, subject, evidence, remedy);
            }
            (false, false) => {
                let evidence = "it has both selectors and devices; the reference ends with an error".to_owned();
                let remedy = "move the names of devices into selectors.ifNames";
                self.add(id::K8S_SELECTOR, Severity::Error, subject, evidence, remedy);
            }
            (false, true) => {
                let evidence = "it uses devices, which is deprecated".to_owned();
                let remedy = format!("write \"selectors\": {{\"ifNames\": {devices:?}}}");
                self.add(id::K8S_SELECTOR, Severity::Info, subject, evidence, remedy);
                return selectors.with_values(SelectorKey::IfNames, devices);
            }
            (true, false) => {}
        }
        selectors
    }

    fn check_name(&mut self, subject: &str, name: &str, prefix: &str) {
        let valid = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        let error = if name.is_empty() {
            Some(("resourceName is missing or empty".to_owned(), "write \"resourceName\": \"ib\"".to_owned()))
        } else if let Some((before, after)) = name.rsplit_once('/') {
            let remedy = format!("write \"resourcePrefix\": \"{before}\", \"resourceName\": \"{after}\"");
            Some((format!("'{name}' is no resource name: the part before the slash is the prefix"), remedy))
        } else if !valid {
            let better: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
            let evidence = format!("resourceName '{name}' has other characters than letters, digits and underscores");
            Some((evidence, format!("for example \"{better}\"")))
        } else if name.len() > MAX_RESOURCE_NAME {
            let evidence = format!("resourceName has {} characters, and kubelet takes {MAX_RESOURCE_NAME}", name.len());
            Some((evidence, "shorten it".to_owned()))
        } else if name.starts_with('_') || name.ends_with('_') {
            let evidence = format!("resourceName '{name}' begins or ends with an underscore, and kubelet refuses it");
            Some((evidence, format!("write \"{}\"", name.trim_matches('_'))))
        } else {
            None
        };
        if let Some((evidence, remedy)) = error {
            self.add(id::K8S_RESOURCE_NAME, Severity::Error, subject, evidence, remedy);
        }
        if let Some(why) = prefix_error(prefix) {
            let evidence = format!("resourcePrefix '{prefix}' {why}: kubelet refuses the resource");
            let remedy = "leave the key out for the prefix rdma, or write a domain of yours, as in example.com";
            self.add(id::K8S_RESOURCE_NAME, Severity::Error, subject, evidence, remedy);
        }
    }

    fn check_unique(&mut self) {
        for (name, entries) in std::mem::take(&mut self.named) {
            for (at, (index, prefix)) in entries.iter().enumerate().skip(1) {
                let subject = format!("configList[{index}] ({prefix}/{name})");
                let same = entries[..at].iter().find(|(_, other)| other == prefix);
                match same {
                    Some((first, _)) => {
                        let evidence = format!("configList[{first}] has the same resource name and prefix");
                        let remedy = "give it another resourceName, or join the two entries";
                        self.add(id::K8S_RESOURCE_NAME, Severity::Error, &subject, evidence, remedy);
                    }
                    None => {
                        let evidence = format!("configList[{}] has the same name with another prefix", entries[0].0);
                        let remedy = "valid here; the reference compares names without prefixes and ends with an error";
                        self.add(id::K8S_RESOURCE_NAME, Severity::Warning, &subject, evidence, remedy);
                    }
                }
            }
        }
    }

    fn check_spelling(&mut self, subject: &str, selectors: &DeviceSelectors) {
        for key in SelectorKey::ALL {
            for value in selectors.values(key) {
                if let Some(remedy) = spelling_remedy(key, value) {
                    let evidence = format!("{}: '{value}' can match nothing", key.as_str());
                    self.add(id::K8S_SELECTOR, Severity::Warning, subject, evidence, remedy);
                }
            }
        }
    }
}

/// The kind of an object that is no configuration of this plugin, and the remedy; `None` when the object may be a configuration.
fn foreign_object(entries: &[(String, JsonNode)]) -> Option<(&'static str, &'static str)> {
    let value = |key: &str| entries.iter().find(|(k, _)| k.eq_ignore_ascii_case(key)).map(|(_, v)| v);
    if value("configList").is_some() {
        return None;
    }
    if matches!(value("config.json"), Some(JsonNode::Text(_))) {
        let evidence = "it has the key 'config.json': it is the data of a ConfigMap, not the file itself";
        return Some((evidence, "give the text below that key"));
    }
    if value("kind").is_some() && value("apiVersion").is_some() {
        let evidence = "it is an object of Kubernetes, not the file itself";
        if matches!(value("kind"), Some(JsonNode::Text(kind)) if kind == "NicClusterPolicy") {
            return Some((evidence, NIC_CLUSTER_POLICY_REMEDY));
        }
        return Some((
            evidence,
            "of a ConfigMap, give the text of its data: kubectl get cm NAME -o jsonpath='{.data.config\\.json}'",
        ));
    }
    if value("resourceList").is_some() {
        let evidence = "it has the key resourceList: it is the configuration of the SR-IOV network device plugin";
        return Some((
            evidence,
            "that plugin gives virtual functions; `spurline k8s discover` prints a configuration of this one",
        ));
    }
    if value("resourceName").is_some() {
        let evidence = "it is one entry, without the list around it";
        return Some((evidence, "write {\"configList\": [ENTRY]}"));
    }
    None
}

/// The value of a key that is given twice, as Go's decoder leaves it, and the sentence about that: objects are merged, in lists
/// by position; of other values the last counts.
fn merge_repeated(first: JsonNode, last: JsonNode) -> (JsonNode, &'static str) {
    match (first, last) {
        (JsonNode::Object(mut entries), JsonNode::Object(more)) => {
            entries.extend(more);
            (JsonNode::Object(entries), "both count together")
        }
        (JsonNode::Array(first), JsonNode::Array(last))
            if first.iter().chain(&last).any(|node| matches!(node, JsonNode::Object(_))) =>
        {
            let mut before = first.into_iter();
            (
                JsonNode::Array(
                    last.into_iter()
                        .map(|item| match before.next() {
                            Some(earlier) => merge_repeated(earlier, item).0,
                            None => item,
                        })
                        .collect(),
                ),
                "entries of the same position are merged",
            )
        }
        (first @ JsonNode::Object(_), JsonNode::Null) => (first, "the first one counts"),
        (_, last) => (last, "the last one counts"),
    }
}

/// The known key that a text most likely means.
fn nearest_key(key: &str, known: &'static [&'static str]) -> Option<&'static str> {
    let lower = key.to_ascii_lowercase();
    let simple: String = lower.chars().filter(char::is_ascii_alphanumeric).collect();
    if let Some(found) =
        known.iter().find(|k| k.eq_ignore_ascii_case(&simple) || k.eq_ignore_ascii_case(&format!("{simple}s")))
    {
        return Some(found);
    }
    let lowered: Vec<String> = known.iter().map(|k| k.to_ascii_lowercase()).collect();
    let near = nearest_word(&simple, lowered.iter().map(String::as_str))?;
    known.iter().copied().find(|k| k.eq_ignore_ascii_case(near))
}

/// The probable fault of a text that is not JSON.
fn syntax_remedy(text: &str) -> String {
    let trimmed = text.trim_start();
    let trailing = {
        let packed: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        packed.contains(",]") || packed.contains(",}")
    };
    if trimmed.is_empty() {
        "the file is empty; `spurline k8s discover` prints a configuration".to_owned()
    } else if trimmed.contains("kind: NicClusterPolicy") {
        format!("this is a NicClusterPolicy: {NIC_CLUSTER_POLICY_REMEDY}")
    } else if trimmed.starts_with("apiVersion") || trimmed.starts_with("kind:") || trimmed.contains("config.json: |") {
        "this is a ConfigMap: give the text below its key config.json".to_owned()
    } else if trailing {
        "remove the comma before a closing bracket".to_owned()
    } else if text.contains("//") || text.contains("/*") {
        "JSON has no comments: remove them".to_owned()
    } else if !trimmed.starts_with(['{', '[']) && is_yaml(trimmed) {
        "this is YAML, and the file is JSON: write {\"configList\": [{\"resourceName\": …}]}".to_owned()
    } else if text.contains('\'') {
        "strings in JSON have double quotes".to_owned()
    } else {
        "correct the file at the named line".to_owned()
    }
}

/// Whether the first line that is no comment is a key of YAML.
fn is_yaml(text: &str) -> bool {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#') && *line != "---");
    let key = first.and_then(|line| line.split_once(':')).map(|(key, _)| key.trim_start_matches("- "));
    key.is_some_and(|key| !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'))
}

/// Why kubelet refuses a prefix: a prefix has to be a DNS subdomain outside Kubernetes' own.
fn prefix_error(prefix: &str) -> Option<&'static str> {
    if prefix.contains('_') {
        return Some("has an underscore, and a domain has none");
    }
    // kubelet looks for "kubernetes.io/" in the whole name, and for "requests." at the beginning.
    if prefix.ends_with("kubernetes.io") {
        return Some("is reserved for Kubernetes");
    }
    if prefix.starts_with("requests.") {
        return Some("begins like a quota's name");
    }
    if prefix.len() > 253 - "requests.".len() || !prefix.split('.').all(is_label) {
        return Some("is no domain in lower case");
    }
    None
}

fn is_label(l: &str) -> bool {
    !l.is_empty()
        && l.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !l.starts_with('-')
        && !l.ends_with('-')
}

/// The correct spelling of a value that no device can have.
fn spelling_remedy(key: SelectorKey, value: &str) -> Option<String> {
    if value.is_empty() {
        return Some("remove the empty string".to_owned());
    }
    if value.trim() != value {
        return Some(format!("remove the spaces: \"{}\"", value.trim()));
    }
    match key {
        SelectorKey::Vendors | SelectorKey::DeviceIds => {
            if is_hex_id(value) {
                return None;
            }
            let lower = value.to_ascii_lowercase();
            let bare = lower.strip_prefix("0x").unwrap_or(&lower);
            if is_hex_id(bare) {
                return Some(format!("write four lower-case hexadecimal digits: \"{bare}\""));
            }
            if let Some((vendor, device)) = bare.split_once(':')
                && is_hex_id(vendor)
                && is_hex_id(device)
            {
                return Some(format!("write \"vendors\": [\"{vendor}\"], \"deviceIDs\": [\"{device}\"]"));
            }
            let known = [("mellanox", "15b3"), ("nvidia", "15b3"), ("intel", "8086"), ("broadcom", "14e4")];
            match known.iter().find(|(name, _)| lower.contains(name)) {
                Some((_, id)) if key == SelectorKey::Vendors => Some(format!("write the id: \"{id}\"")),
                _ => Some("write the id as lspci -nn shows it, four lower-case hexadecimal digits".to_owned()),
            }
        }
        SelectorKey::LinkTypes => match value {
            "infiniband" | "ether" => None,
            _ => match value.to_ascii_lowercase().as_str() {
                "ethernet" | "eth" | "ether" | "roce" => Some("Ethernet is spelled \"ether\"".to_owned()),
                "ib" | "infiniband" => Some("InfiniBand is spelled \"infiniband\"".to_owned()),
                _ => Some("the link types are \"infiniband\" and \"ether\"".to_owned()),
            },
        },
        SelectorKey::Drivers => match value {
            "mlx5_ib" => Some("the selector names the PCI driver: \"mlx5_core\"".to_owned()),
            "mlx4_ib" => Some("the selector names the PCI driver: \"mlx4_core\"".to_owned()),
            "irdma" => Some("the selector names the PCI driver: \"ice\"".to_owned()),
            "bnxt_re" => Some("the selector names the PCI driver: \"bnxt_en\"".to_owned()),
            _ => None,
        },
        SelectorKey::IfNames => {
            if value.contains(['*', '?', '[']) {
                Some("patterns are not supported: name each interface".to_owned())
            } else if value.contains([',', ':', ' ']) {
                Some("give each interface its own string: [\"ib0\", \"ib1\"]".to_owned())
            } else if value.len() > MAX_INTERFACE_NAME {
                Some(format!("an interface name has at most {MAX_INTERFACE_NAME} characters"))
            } else if value.contains('/') {
                Some("name the interface without a path".to_owned())
            } else {
                None
            }
        }
    }
}

fn is_hex_id(v: &str) -> bool {
    v.len() == 4 && v.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}
