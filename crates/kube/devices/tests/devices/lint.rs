//! Configurations of the device plugin on made-up nodes: every rule of the reference, and mistakes that its users report.

use spurline_fabric::{HostFinding, HostTree, Severity, TreeEntry};
use spurline_kube_devices::{NodeHcas, PluginConfig, SelectorKey, lint_config, read_config, select_hcas};
use spurline_testkit::hosts;
use spurline_testkit::hosts::Made;
use std::time::Duration;

fn node(made: &Made) -> NodeHcas {
    NodeHcas::read_from(&HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link)))
}

/// A configuration with one entry.
fn one(entry: &str) -> String {
    format!("{{\"configList\": [{entry}]}}")
}

/// The same with selectors.
fn select(selectors: &str) -> String {
    one(&format!("{{\"resourceName\": \"x\", \"rdmaHcaMax\": 10, \"selectors\": {{{selectors}}}}}"))
}

use Severity::{Error as E, Info as I, Warning as W};

/// Id, severity, and a part of the evidence or the remedy.
type Expected = (&'static str, Severity, &'static str);

struct LintCase {
    what: &'static str,
    host: fn() -> Made,
    config: String,
    /// Findings that must be there. Without one that is an error, no finding may be an error.
    expected: Vec<Expected>,
}

fn case(what: &'static str, host: fn() -> Made, config: String, expected: Vec<Expected>) -> LintCase {
    LintCase { what, host, config, expected }
}

fn gb200_exclusive() -> Made {
    let mut made = hosts::gb200();
    let json = String::from_utf8(made.files["netlink.json"].clone()).unwrap();
    made.put("netlink.json", json.trim().replace("\"rdma_exclusive\":false", "\"rdma_exclusive\":true"));
    made
}

fn gb200_without_uverbs() -> Made {
    let mut made = hosts::gb200();
    made.remove("sys/class/infiniband_verbs");
    made
}

fn gb200_without_cm() -> Made {
    let mut made = hosts::gb200();
    made.remove("sys/class/misc/rdma_cm").remove("dev/infiniband/rdma_cm");
    made
}

fn gb200_without_ipoib() -> Made {
    let mut made = hosts::gb200();
    for (directory, net) in [
        ("0000:03:00.0", "ibp3s0"),
        ("0002:03:00.0", "ibP2p3s0"),
        ("0010:03:00.0", "ibP16p3s0"),
        ("0012:03:00.0", "ibP18p3s0"),
    ] {
        made.remove(&format!("sys/devices/pci{}/{directory}/net/{net}", &directory[..7]));
        made.remove(&format!("sys/class/net/{net}"));
    }
    made
}

fn roce_with_vlan() -> Made {
    let mut made = hosts::roce_jumbo();
    made.net(
        None,
        &hosts::Net {
            name: "ens1f0np0.100",
            kind: 1,
            mtu: 9000,
            operstate: "up",
            speed: 100_000,
            mode: "",
            dev_port: 0,
        },
    );
    made.link(
        "sys/devices/virtual/net/ens1f0np0.100/lower_ens1f0np0",
        "../../../pci0000:41/0000:41:00.0/net/ens1f0np0",
    );
    made
}

fn syntax_cases() -> Vec<LintCase> {
    let gb200 = hosts::gb200 as fn() -> Made;
    vec![
        case("empty file", gb200, String::new(), vec![("K8S-CONFIG-FILE", E, "the file is empty")]),
        case("not JSON", gb200, "configList: []".into(), vec![("K8S-CONFIG-FILE", E, "not JSON")]),
        case("a list", gb200, "[]".into(), vec![("K8S-CONFIG-FILE", E, "not an object")]),
        case("a comma too many", gb200, "{\"configList\": [],}".into(), vec![("K8S-CONFIG-FILE", E, "comma before")]),
        case("a comment", gb200, "{ // x\n\"configList\": []}".into(), vec![("K8S-CONFIG-FILE", E, "no comments")]),
        case("keys without quotes", gb200, "{configList: []}".into(), vec![("K8S-CONFIG-FILE", E, "not JSON")]),
        case(
            "a comma in a list",
            gb200,
            select("\"vendors\": [\"15b3\",]"),
            vec![("K8S-CONFIG-FILE", E, "comma before")],
        ),
        case("single quotes", gb200, "{'configList': []}".into(), vec![("K8S-CONFIG-FILE", E, "double quotes")]),
        case("byte order mark", gb200, "\u{feff}{}".into(), vec![("K8S-CONFIG-FILE", E, "byte order mark")]),
        case(
            "a whole ConfigMap",
            gb200,
            "apiVersion: v1\nkind: ConfigMap\ndata:\n  config.json: |\n    {}".into(),
            vec![("K8S-CONFIG-FILE", E, "this is a ConfigMap")],
        ),
        case(
            "a ConfigMap's data",
            gb200,
            "{\"config.json\": \"{}\"}".into(),
            vec![("K8S-CONFIG-FILE", E, "data of a ConfigMap")],
        ),
        case("no list", gb200, "{}".into(), vec![("K8S-CONFIG-FILE", E, "missing or empty")]),
        case("an empty list", gb200, "{\"configList\": []}".into(), vec![("K8S-CONFIG-FILE", E, "missing or empty")]),
        case("list is an object", gb200, "{\"configList\": {}}".into(), vec![("K8S-CONFIG-FILE", E, "not a list")]),
        case("entry is a text", gb200, one("\"ib\""), vec![("K8S-CONFIG-FILE", E, "not an object")]),
        case(
            "negative interval",
            gb200,
            "{\"periodicUpdateInterval\": -1, \"configList\": [{\"resourceName\": \"x\"}]}".into(),
            vec![("K8S-CONFIG-FILE", E, "negative")],
        ),
        case(
            "interval as text",
            gb200,
            "{\"periodicUpdateInterval\": \"60s\", \"configList\": [{\"resourceName\": \"x\"}]}".into(),
            vec![("K8S-CONFIG-FILE", E, "periodicUpdateInterval is a string")],
        ),
        case(
            "interval 0",
            gb200,
            select("\"linkTypes\": [\"infiniband\"]").replacen('{', "{\"periodicUpdateInterval\": 0, ", 1),
            vec![("K8S-CONFIG-KEY", I, "periodicUpdateInterval is 0")],
        ),
        case(
            "interval without end",
            gb200,
            select("\"linkTypes\": [\"infiniband\"]").replacen(
                '{',
                "{\"periodicUpdateInterval\": 9223372036854775807, ",
                1,
            ),
            vec![("K8S-CONFIG-KEY", W, "more than a year")],
        ),
        case(
            "a ConfigMap as JSON",
            gb200,
            "{\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\", \"data\": {\"config.json\": \"{}\"}}".into(),
            vec![("K8S-CONFIG-FILE", E, "an object of Kubernetes")],
        ),
        case(
            "the SR-IOV plugin's file",
            gb200,
            "{\"resourceList\": [{\"resourceName\": \"x\"}]}".into(),
            vec![("K8S-CONFIG-FILE", E, "SR-IOV network device plugin")],
        ),
        case(
            "an entry without its list",
            gb200,
            "{\"resourceName\": \"x\", \"rdmaHcaMax\": 1}".into(),
            vec![("K8S-CONFIG-FILE", E, "without the list around it")],
        ),
        case(
            "YAML",
            gb200,
            "# devices\nconfigList:\n- resourceName: x\n".into(),
            vec![("K8S-CONFIG-FILE", E, "this is YAML")],
        ),
        case(
            "an unknown key",
            gb200,
            select("\"linkTypes\": [\"infiniband\"]").replace("rdmaHcaMax", "rdmaHCAmaximum"),
            vec![("K8S-CONFIG-KEY", W, "\"rdmaHCAmaximum\" is not known"), ("K8S-SLOTS", W, "absent")],
        ),
        case(
            "a misspelled key",
            gb200,
            select("\"linkTypes\": [\"infiniband\"], \"vendor\": [\"15b3\"]"),
            vec![("K8S-CONFIG-KEY", W, "did you mean \"vendors\"?")],
        ),
        case(
            "snake case",
            gb200,
            select("\"link_types\": [\"infiniband\"], \"vendors\": [\"15b3\"]"),
            vec![("K8S-CONFIG-KEY", W, "did you mean \"linkTypes\"?")],
        ),
        case(
            "keys in another case",
            gb200,
            select("\"LINKTYPES\": [\"infiniband\"]")
                .replace("configList", "ConfigList")
                .replace("rdmaHcaMax", "rdmahcamax"),
            vec![("K8S-MATCH", I, "mlx5_0")],
        ),
        case(
            "a key twice",
            gb200,
            select("\"linkTypes\": [\"ether\"], \"linkTypes\": [\"infiniband\"]"),
            vec![("K8S-CONFIG-KEY", W, "given twice: the last one counts"), ("K8S-MATCH", I, "mlx5_0 (InfiniBand")],
        ),
        case(
            "an object twice",
            gb200,
            select("\"vendors\": [\"15b3\"]")
                .replace("\"rdmaHcaMax\"", "\"selectors\": {\"linkTypes\": [\"ether\"]}, \"rdmaHcaMax\""),
            vec![
                ("K8S-CONFIG-KEY", W, "both count together"),
                ("K8S-HCA-UNCLAIMED", I, "mlx5_0"),
                ("K8S-MATCH", I, "mlx5_bond_0"),
            ],
        ),
        case(
            "numbers as vendors",
            gb200,
            select("\"vendors\": [15]"),
            vec![("K8S-CONFIG-FILE", E, "put quotes around the values")],
        ),
        case("a text for a list", gb200, select("\"vendors\": \"15b3\""), vec![("K8S-CONFIG-FILE", E, "not a list")]),
    ]
}

fn entry_cases() -> Vec<LintCase> {
    let gb200 = hosts::gb200 as fn() -> Made;
    let named = |name: &str| {
        one(&format!("{{\"resourceName\": \"{name}\", \"rdmaHcaMax\": 1, \"selectors\": {{\"vendors\": [\"15b3\"]}}}}"))
    };
    let prefixed = |prefix: &str| {
        named("x").replace("{\"resourceName\"", &format!("{{\"resourcePrefix\": \"{prefix}\", \"resourceName\""))
    };
    let slots = |text: &str| select("\"linkTypes\": [\"infiniband\"]").replace("\"rdmaHcaMax\": 10, ", text);
    let two = |a: &str, b: &str| {
        let entry = |more: &str, link: &str| {
            format!(
                "{{\"resourceName\": \"ib\", {more} \"rdmaHcaMax\": 9, \"selectors\": {{\"linkTypes\": [\"{link}\"]}}}}"
            )
        };
        format!("{{\"configList\": [{}, {}]}}", entry(a, "infiniband"), entry(b, "ether"))
    };
    vec![
        case(
            "no name",
            gb200,
            one("{\"rdmaHcaMax\": 1, \"devices\": [\"a\"]}"),
            vec![("K8S-RESOURCE-NAME", E, "missing")],
        ),
        case(
            "prefix in the name",
            gb200,
            named("rdma/ib"),
            vec![("K8S-RESOURCE-NAME", E, "'rdma/ib' is no resource name")],
        ),
        case("a dash in the name", gb200, named("hca-ib"), vec![("K8S-RESOURCE-NAME", E, "hca_ib")]),
        case("an underscore at the end", gb200, named("hca_"), vec![("K8S-RESOURCE-NAME", E, "kubelet refuses it")]),
        case("a long name", gb200, named(&"a".repeat(64)), vec![("K8S-RESOURCE-NAME", E, "64 characters")]),
        case(
            "the reference's own example",
            gb200,
            prefixed("example_prefix"),
            vec![("K8S-RESOURCE-NAME", E, "underscore")],
        ),
        case("a reserved prefix", gb200, prefixed("kubernetes.io"), vec![("K8S-RESOURCE-NAME", E, "reserved")]),
        case("a prefix in capitals", gb200, prefixed("Example.com"), vec![("K8S-RESOURCE-NAME", E, "lower case")]),
        case(
            "below a reserved prefix",
            gb200,
            prefixed("example.kubernetes.io"),
            vec![("K8S-RESOURCE-NAME", E, "reserved")],
        ),
        case("not below it", gb200, prefixed("kubernetes.io.example.com"), vec![("K8S-MATCH", I, "mlx5_0")]),
        case(
            "a quota's prefix",
            gb200,
            prefixed("requests.example.com"),
            vec![("K8S-RESOURCE-NAME", E, "a quota's name")],
        ),
        case("a domain as prefix", gb200, prefixed("nvidia.com"), vec![("K8S-MATCH", I, "mlx5_0")]),
        case("one name twice", gb200, two("", ""), vec![("K8S-RESOURCE-NAME", E, "same resource name and prefix")]),
        case(
            "one name in two prefixes",
            gb200,
            two("", "\"resourcePrefix\": \"example.com\","),
            vec![("K8S-RESOURCE-NAME", W, "the reference compares names without prefixes")],
        ),
        case("no number", gb200, slots(""), vec![("K8S-SLOTS", W, "absent, which means 0")]),
        case("null as number", gb200, slots("\"rdmaHcaMax\": null, "), vec![("K8S-SLOTS", W, "absent")]),
        case("zero", gb200, slots("\"rdmaHcaMax\": 0, "), vec![("K8S-SLOTS", W, "rdmaHcaMax is 0")]),
        case("negative", gb200, slots("\"rdmaHcaMax\": -5, "), vec![("K8S-SLOTS", E, "negative")]),
        case("a text", gb200, slots("\"rdmaHcaMax\": \"1000\", "), vec![("K8S-SLOTS", E, "a string")]),
        case("a fraction", gb200, slots("\"rdmaHcaMax\": 10.5, "), vec![("K8S-SLOTS", E, "a fraction")]),
        case(
            "an exponent",
            gb200,
            slots("\"rdmaHcaMax\": 1e3, "),
            vec![("K8S-SLOTS", E, "exponent, not a whole number")],
        ),
        case("too large", gb200, slots("\"rdmaHcaMax\": 99999999999, "), vec![("K8S-SLOTS", E, "too large")]),
        case(
            "more than a message holds",
            gb200,
            slots("\"rdmaHcaMax\": 1000000, "),
            vec![("K8S-SLOTS", W, "fit a message of kubelet's API")],
        ),
        case("fewer than HCAs", gb200, slots("\"rdmaHcaMax\": 2, "), vec![("K8S-SLOTS", W, "some get no slot")]),
        case(
            "neither selectors nor devices",
            gb200,
            one("{\"resourceName\": \"x\", \"rdmaHcaMax\": 1}"),
            vec![("K8S-SELECTOR", E, "neither")],
        ),
        case(
            "empty lists",
            gb200,
            select("\"vendors\": [], \"ifNames\": []"),
            vec![("K8S-SELECTOR", E, "only empty lists")],
        ),
        case(
            "both",
            gb200,
            one(
                "{\"resourceName\": \"x\", \"rdmaHcaMax\": 1, \"devices\": [\"ib0\"], \"selectors\": {\"vendors\": [\"15b3\"]}}",
            ),
            vec![("K8S-SELECTOR", E, "both")],
        ),
        case(
            "the old form",
            gb200,
            one("{\"resourceName\": \"x\", \"rdmaHcaMax\": 8, \"devices\": [\"ibp3s0\", \"ibP2p3s0\"]}"),
            vec![("K8S-SELECTOR", I, "deprecated"), ("K8S-MATCH", I, "mlx5_1")],
        ),
        case(
            "an unknown extra device",
            gb200,
            one("{\"resourceName\": \"x\", \"rdmaHcaMax\": 8, \"devices\": [\"ibp3s0\"], \"extraDevices\": [\"ucm\"]}"),
            vec![("K8S-SELECTOR", E, "'ucm'")],
        ),
    ]
}

fn selector_cases() -> Vec<LintCase> {
    let gb200 = hosts::gb200 as fn() -> Made;
    vec![
        case(
            "ethernet for ether",
            gb200,
            select("\"linkTypes\": [\"ethernet\"]"),
            vec![("K8S-SELECTOR", W, "Ethernet is spelled \"ether\""), ("K8S-NO-MATCH", E, "no entry matches")],
        ),
        case(
            "IB for infiniband",
            gb200,
            select("\"linkTypes\": [\"IB\"]"),
            vec![("K8S-SELECTOR", W, "\"infiniband\"")],
        ),
        case("0x before an id", gb200, select("\"vendors\": [\"0x15b3\"]"), vec![("K8S-SELECTOR", W, "\"15b3\"")]),
        case("capitals in an id", gb200, select("\"vendors\": [\"15B3\"]"), vec![("K8S-SELECTOR", W, "\"15b3\"")]),
        case("a vendor's name", gb200, select("\"vendors\": [\"Mellanox\"]"), vec![("K8S-SELECTOR", W, "\"15b3\"")]),
        case(
            "both ids in one",
            gb200,
            select("\"deviceIDs\": [\"15b3:1021\"]"),
            vec![("K8S-SELECTOR", W, "\"deviceIDs\": [\"1021\"]")],
        ),
        case("a model's name", gb200, select("\"deviceIDs\": [\"MT4129\"]"), vec![("K8S-SELECTOR", W, "lspci -nn")]),
        case(
            "the RDMA driver",
            gb200,
            select("\"drivers\": [\"mlx5_ib\"]"),
            vec![("K8S-SELECTOR", W, "\"mlx5_core\"")],
        ),
        case("a pattern", gb200, select("\"ifNames\": [\"ib*\"]"), vec![("K8S-SELECTOR", W, "patterns")]),
        case(
            "names in one string",
            gb200,
            select("\"ifNames\": [\"ib0,ib1\"]"),
            vec![("K8S-SELECTOR", W, "its own string")],
        ),
        case("spaces", gb200, select("\"ifNames\": [\" ibp3s0\"]"), vec![("K8S-SELECTOR", W, "remove the spaces")]),
        case(
            "an RDMA device",
            gb200,
            select("\"ifNames\": [\"mlx5_0\"]"),
            vec![("K8S-SELECTOR", W, "name its interface")],
        ),
        case(
            "a typo",
            gb200,
            select("\"ifNames\": [\"ibp3s1\"]"),
            vec![("K8S-NO-MATCH", W, "did you mean \"ibp3s0\"?")],
        ),
        case(
            "another case",
            gb200,
            select("\"ifNames\": [\"IBP3S0\"]"),
            vec![("K8S-NO-MATCH", W, "with their case: write \"ibp3s0\"")],
        ),
        case(
            "another case beside a name that fits",
            gb200,
            select("\"ifNames\": [\"ibp3s0\", \"IBp2P3S0\"]"),
            vec![("K8S-NO-MATCH", I, "write \"ibP2p3s0\"")],
        ),
        case(
            "an interface without RDMA",
            hosts::efa,
            select("\"ifNames\": [\"ens5\"]"),
            vec![("K8S-NO-MATCH", W, "exists and has no RDMA device")],
        ),
        case(
            "another device id",
            gb200,
            select("\"vendors\": [\"15b3\"], \"deviceIDs\": [\"1017\"]"),
            vec![("K8S-NO-MATCH", W, "deviceIDs are 1021, not 1017")],
        ),
        case(
            "a bond",
            gb200,
            select("\"ifNames\": [\"bond0\"]"),
            vec![("K8S-MATCH", I, "mlx5_bond_0"), ("K8S-SELECTOR", I, "name the member enP6p3s0f0np0")],
        ),
        case(
            "a bond's second member",
            gb200,
            select("\"ifNames\": [\"enP6p3s0f1np1\"]"),
            vec![("K8S-MATCH", I, "mlx5_bond_0")],
        ),
        case("a VLAN", roce_with_vlan, select("\"ifNames\": [\"ens1f0np0.100\"]"), vec![("K8S-MATCH", I, "mlx5_0")]),
        case(
            "one name of two that exists",
            gb200,
            select("\"ifNames\": [\"ibp3s0\", \"ib7\"]"),
            vec![("K8S-NO-MATCH", I, "ib7 does not exist on this node")],
        ),
    ]
}

fn node_cases() -> Vec<LintCase> {
    let gb200 = hosts::gb200 as fn() -> Made;
    let all = || select("\"vendors\": [\"15b3\"]");
    let ib = || select("\"linkTypes\": [\"infiniband\"]");
    vec![
        case("mixed links", gb200, all(), vec![("K8S-MIXED-HCAS", W, "InfiniBand and RoCE")]),
        case("one HCA for a slot", gb200, ib(), vec![("K8S-ONE-HCA", I, "one HCA of 4"), ("K8S-HCA-UNCLAIMED", I, "mlx5_bond_0")]),
        case(
            "one HCA for a slot on Ethernet",
            gb200,
            select("\"linkTypes\": [\"ether\"]"),
            vec![("K8S-ONE-HCA", W, "one HCA of 2"), ("K8S-ONE-HCA", W, "x_bond0 with ifNames [\"enP6p3s0f0np0\"]")],
        ),
        case("InfiniBand without IPoIB", gb200_without_ipoib, ib(), vec![("K8S-SELECTOR", I, "load ib_ipoib"), ("K8S-MATCH", I, "mlx5_0")]),
        case(
            "two entries for one HCA",
            gb200,
            "{\"configList\": [{\"resourceName\": \"a\", \"rdmaHcaMax\": 8, \"selectors\": {\"ifNames\": [\"ibp3s0\"]}},
              {\"resourceName\": \"b\", \"rdmaHcaMax\": 8, \"selectors\": {\"linkTypes\": [\"infiniband\"]}}]}"
                .into(),
            vec![("K8S-HCA-SHARED", W, "rdma/a and rdma/b")],
        ),
        case("an exclusive RDMA subsystem", gb200_exclusive, ib(), vec![("RDMA-NAMESPACE", E, "netns shared")]),
        case("no device nodes", gb200_without_uverbs, ib(), vec![("K8S-HCA-UNUSABLE", W, "ib_uverbs is not loaded")]),
        case("no connection manager", gb200_without_cm, ib(), vec![("K8S-HCA-UNUSABLE", W, "rdma_ucm")]),
        case("a port that trains", hosts::no_sm, ib(), vec![("K8S-HCA-UNUSABLE", W, "no port is active: INIT, DOWN")]),
        case("a node without RDMA", hosts::plain, ib(), vec![("K8S-NO-MATCH", I, "runs idle")]),
        case("an HCA without an interface", hosts::efa, select("\"drivers\": [\"efa\"]"), vec![("K8S-MATCH", I, "rdmap0s27")]),
        case("Soft-RoCE", hosts::soft_roce, select("\"ifNames\": [\"eth9\"]"), vec![("K8S-MATCH", I, "rxe0")]),
        case("iWARP and RoCE", hosts::e810, select("\"linkTypes\": [\"ether\"]"), vec![("K8S-MIXED-HCAS", W, "RoCE and iWARP")]),
        case(
            "umad where there is none",
            || {
                let mut made = hosts::gb200();
                made.remove("sys/class/infiniband_mad");
                made
            },
            one("{\"resourceName\": \"x\", \"rdmaHcaMax\": 8, \"devices\": [\"ibp3s0\"], \"extraDevices\": [\"umad\"]}"),
            vec![("K8S-HCA-UNUSABLE", W, "modprobe ib_umad")],
        ),
    ]
}

fn words(found: &[HostFinding]) -> String {
    let line = |f: &HostFinding| format!("  {:?} {} {}: {}; {}", f.severity, f.id, f.subject, f.evidence, f.remedy);
    found.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_trap_has_its_finding() {
    let cases: Vec<LintCase> =
        [syntax_cases(), entry_cases(), selector_cases(), node_cases()].into_iter().flatten().collect();
    assert!(cases.len() >= 40, "{}", cases.len());
    let mut broken = Vec::new();
    for LintCase { what, host, config, expected } in cases {
        let found = lint_config(&config, "config.json", &node(&host()));
        for (id, severity, part) in &expected {
            let fits = |f: &&HostFinding| {
                f.id == *id && f.severity == *severity && (f.evidence.contains(part) || f.remedy.contains(part))
            };
            if !found.iter().any(|f| fits(&f)) {
                broken.push(format!("{what}: no {id} of {severity:?} with '{part}' in\n{}", words(&found)));
            }
        }
        // A selector that is wrong leaves its only entry without an HCA, which is an error of its own.
        let is_wrong = expected.iter().any(|(id, ..)| *id == "K8S-SELECTOR");
        let follows =
            |f: &HostFinding| f.id == "K8S-NO-MATCH" && (is_wrong || expected.iter().any(|(id, ..)| *id == f.id));
        let is_expected = expected.iter().any(|(_, severity, _)| *severity == E);
        if !is_expected && found.iter().any(|f| f.severity == E && !follows(f)) {
            broken.push(format!("{what}: an error that is none:\n{}", words(&found)));
        }
        let has_remedy = |f: &HostFinding| !f.remedy.is_empty() && !f.evidence.is_empty() && !f.subject.is_empty();
        assert!(found.iter().all(has_remedy), "{what}: {}", words(&found));
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn the_references_example_reads_as_documented() {
    let text = r#"{
      "periodicUpdateInterval": 300,
      "configList": [
        {"resourceName": "hca_shared_devices_a", "rdmaHcaMax": 1000, "devices": ["ib0", "ib1"]},
        {"resourceName": "hca_shared_devices_b", "rdmaHcaMax": 500,
         "selectors": {"vendors": ["15b3"], "deviceIDs": ["1017"], "ifNames": ["ib3", "ib4"]}}
      ]
    }"#;
    let config: PluginConfig = read_config(text, "config.json").config.unwrap();
    assert_eq!(config.update_interval, Some(Duration::from_secs(300)));
    let [a, b] = config.resources.as_slice() else { panic!("{config:?}") };
    assert_eq!((a.resource().as_str(), a.slots), ("rdma/hca_shared_devices_a", 1000));
    assert_eq!(a.selectors.values(SelectorKey::IfNames), ["ib0", "ib1"]);
    assert_eq!(b.selectors.values(SelectorKey::DeviceIds), ["1017"]);
    assert!(!a.extra.umad && !a.extra.issm);
    let absent = text.replace("\"periodicUpdateInterval\": 300,", "");
    assert_eq!(read_config(&absent, "").config.unwrap().update_interval, Some(Duration::from_secs(60)));
}

#[test]
fn selectors_are_combined_and_their_values_are_alternatives() {
    let gb200 = node(&hosts::gb200());
    let names = |selectors: &str| -> Vec<String> {
        let config = read_config(&select(selectors), "").config.unwrap();
        select_hcas(&gb200, &config.resources[0].selectors).iter().map(|h| h.name.clone()).collect()
    };
    assert_eq!(names("\"linkTypes\": [\"infiniband\"]").len(), 4);
    assert_eq!(names("\"linkTypes\": [\"infiniband\", \"ether\"]").len(), 6);
    assert_eq!(names("\"linkTypes\": [\"ether\"], \"ifNames\": [\"bond1\", \"ibp3s0\"]"), ["mlx5_bond_1"]);
    assert!(names("\"vendors\": [\"8086\"], \"linkTypes\": [\"ether\"]").is_empty());
}

/// The HCAs that an entry with these interfaces selects.
fn selected_by(node: &NodeHcas, interfaces: &str) -> Vec<String> {
    let config = read_config(&select(&format!("\"ifNames\": [{interfaces}]")), "").config.unwrap();
    select_hcas(node, &config.resources[0].selectors).iter().map(|h| h.name.clone()).collect()
}

#[test]
fn a_member_of_a_bond_names_its_own_hca_and_the_bond_names_all() {
    let cards = node(&hosts::bond_of_two_cards());
    assert_eq!(selected_by(&cards, "\"ens1f0\""), ["mlx5_1"]);
    assert_eq!(selected_by(&cards, "\"ens2f0\""), ["mlx5_3"]);
    assert_eq!(selected_by(&cards, "\"bond0\""), ["mlx5_1", "mlx5_3"]);
    let ipoib = node(&hosts::ipoib_bond());
    assert_eq!(selected_by(&ipoib, "\"ib0\""), ["mlx5_0"]);
    assert_eq!(selected_by(&ipoib, "\"bond-ib\""), ["mlx5_0", "mlx5_1"]);
    // One HCA carries both members of the bond.
    let aggregated = node(&hosts::gb200());
    assert_eq!(selected_by(&aggregated, "\"enP6p3s0f1np1\""), ["mlx5_bond_0"]);
}

#[test]
fn the_entries_that_lint_proposes_pass_lint() {
    let cards = node(&hosts::bond_of_two_cards());
    let name = "n".repeat(60);
    // A name of the proposal is taken already.
    let other = "{\"resourceName\": \"x_ens1f0\", \"rdmaHcaMax\": 8, \"selectors\": {\"ifNames\": [\"eth0\"]}}";
    for resource in ["x", &name] {
        let entry = format!(
            "{{\"resourceName\": \"{resource}\", \"rdmaHcaMax\": 8, \"selectors\": {{\"ifNames\": [\"bond0\"]}}}}"
        );
        let found = lint_config(&format!("{{\"configList\": [{entry}, {other}]}}"), "config.json", &cards);
        let one_hca = found.iter().find(|f| f.id == "K8S-ONE-HCA").unwrap();
        let proposal = one_hca.remedy.split("make an entry for each: ").nth(1).unwrap();
        let entries: Vec<String> = proposal
            .split(", ")
            .map(|entry| {
                let (name, interfaces) = entry.split_once(" with ifNames ").unwrap();
                format!(
                    "{{\"resourceName\": \"{name}\", \"rdmaHcaMax\": 8, \"selectors\": {{\"ifNames\": {interfaces}}}}}"
                )
            })
            .collect();
        assert_eq!(entries.len(), 2, "{proposal}");
        let text = format!("{{\"configList\": [{}, {other}]}}", entries.join(", "));
        let found = lint_config(&text, "config.json", &cards);
        assert!(found.iter().all(|f| f.severity != E && f.id != "K8S-HCA-SHARED"), "{text}:\n{}", words(&found));
        assert_eq!(found.iter().filter(|f| f.id == "K8S-MATCH").count(), 2, "{text}:\n{}", words(&found));
    }
}

#[test]
fn an_interface_may_be_named_like_a_device() {
    let mut made = hosts::cloud_ipoib();
    let at = "sys/devices/pci0101:00/0101:00:00.0/net";
    let files: Vec<String> = made.files.keys().filter(|p| p.starts_with(at)).cloned().collect();
    for path in files {
        let bytes = made.files.remove(&path).unwrap();
        made.files.insert(path.replace("/net/ib0/", "/net/mlx5_ib1/"), bytes);
    }
    made.remove(&format!("{at}/ib0")).remove("sys/class/net/ib0");
    made.link("sys/class/net/mlx5_ib1", &format!("../../../{at}/mlx5_ib1"));
    made.link(&format!("{at}/mlx5_ib1/device"), "../../../0101:00:00.0");
    let found = lint_config(&select("\"ifNames\": [\"mlx5_ib1\"]"), "config.json", &node(&made));
    assert!(found.iter().any(|f| f.id == "K8S-MATCH"), "{}", words(&found));
    assert!(!found.iter().any(|f| f.id == "K8S-SELECTOR" || f.severity != I), "{}", words(&found));
    let device = lint_config(&select("\"ifNames\": [\"mlx5_ib0\"]"), "config.json", &node(&made));
    let named = device.iter().find(|f| f.id == "K8S-SELECTOR").unwrap();
    assert_eq!((named.severity, named.remedy.as_str()), (W, "name its interface: \"mlx5_ib1\""));
}

#[test]
fn an_hca_with_both_link_layers_is_named_with_its_ports() {
    let mut made = hosts::mt25208();
    made.put("sys/devices/pci0000:05/0000:05:00.0/infiniband/mthca0/ports/2/link_layer", "Ethernet");
    let found = lint_config(&select("\"linkTypes\": [\"infiniband\"]"), "config.json", &node(&made));
    let mixed = found.iter().find(|f| f.id == "K8S-MIXED-HCAS").unwrap();
    let ports = "mthca0 is one HCA with both link layers: port 1 InfiniBand (ACTIVE), port 2 Ethernet (DOWN)";
    assert!(mixed.severity == I && mixed.evidence.starts_with(ports), "{}", words(&found));
    assert!(!found.iter().any(|f| f.evidence.contains("it mixes")), "{}", words(&found));
}

#[test]
fn a_standby_and_a_missing_file_are_said() {
    let found = lint_config(&select("\"ifNames\": [\"bond0\"]"), "config.json", &node(&hosts::bond_of_two_cards()));
    let standby = found.iter().find(|f| f.id == "K8S-HCA-UNUSABLE").unwrap();
    assert!(standby.evidence.starts_with("mlx5_3 is the standby of the bond bond0"), "{standby:?}");
    let mut made = hosts::roce_jumbo();
    made.remove("dev/infiniband/uverbs0");
    let found = lint_config(&select("\"vendors\": [\"15b3\"]"), "config.json", &node(&made));
    assert!(found.iter().any(|f| f.evidence == "mlx5_0: /dev/infiniband/uverbs0 does not exist"), "{}", words(&found));
}

proptest::proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,200}") {
        let _ = read_config(&text, "x");
    }

    #[test]
    fn no_json_makes_it_panic(
        key in "[a-zA-Z]{1,12}|configList|selectors|rdmaHcaMax|resourceName|devices",
        value in "null|true|-1|1e300|\"x\"|\\[\\]|\\{\\}|\\[null\\]|\\[\\[1\\]\\]|184467440737095516150",
    ) {
        let _ = read_config(&format!("{{\"{key}\": {value}}}"), "x");
        let _ = read_config(&one(&format!("{{\"resourceName\": \"x\", \"{key}\": {value}}}")), "x");
        let _ = read_config(&select(&format!("\"{key}\": {value}")), "x");
    }
}
