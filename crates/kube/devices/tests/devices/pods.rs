//! Pods compared with a configuration and nodes, and advice for clusters.

use spurline_fabric::Severity::{Error as E, Info as I, Warning as W};
use spurline_fabric::{HostTree, Severity, TreeEntry};
use spurline_kube_devices::advise::{PodIsolation, RdmaUse, advise};
use spurline_kube_devices::discover::discover;
use spurline_kube_devices::{NodeHcas, PluginConfig, PodContext, explain_pods, read_config};
use spurline_testkit::hosts;
use spurline_testkit::hosts::Made;

fn node(made: &Made) -> NodeHcas {
    NodeHcas::read_from(&HostTree::from_memory(made.entries(TreeEntry::File, TreeEntry::Link)))
}

/// The configuration that `discover` proposes for a node, and the node.
fn context(made: &Made) -> PodContext {
    let nodes = vec![node(made)];
    let text = discover(&nodes, 16).config.to_string();
    PodContext { config: read_config(&text, "").config.expect("a proposal is valid"), nodes }
}

const GOOD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: train}
spec:
  containers:
  - name: main
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    resources: {limits: {rdma/ib: 4}}
";

fn check(what: &str, manifest: &str, context: &PodContext, id: &str, severity: Severity, part: &str) {
    let found = explain_pods(manifest, "pod.yaml", context);
    let fits = |f: &spurline_fabric::HostFinding| {
        f.id == id && f.severity == severity && (f.evidence.contains(part) || f.remedy.contains(part))
    };
    assert!(found.iter().any(fits), "{what}: no {id} with '{part}' in {found:#?}");
    if severity != E {
        assert!(found.iter().all(|f| f.severity != E), "{what}: {found:#?}");
    }
}

#[test]
fn what_a_pod_gets_and_why_not() {
    let gb200 = context(&hosts::gb200());
    let change = |from: &str, to: &str| {
        assert!(GOOD.contains(from), "{from}");
        GOOD.replace(from, to)
    };
    let c = &gb200;
    check("a good pod", GOOD, c, "K8S-MATCH", I, "gets 4 of mlx5_0");
    check("a good pod's network", GOOD, c, "K8S-POD-NETWORK", I, "verbs with LIDs work");
    check("no request", &change("rdma/ib: 4", "cpu: 4"), c, "K8S-POD-REQUEST", E, "no container requests");
    check("unknown", &change("rdma/ib", "rdma/ibb"), c, "K8S-POD-REQUEST", E, "did you mean rdma/ib?");
    check("too many", &change("rdma/ib: 4", "rdma/ib: 8"), c, "K8S-POD-REQUEST", W, "the same HCA twice");
    check("more than slots", &change("rdma/ib: 4", "rdma/ib: 400"), c, "K8S-POD-REQUEST", E, "stays Pending");
    check("a fraction", &change("rdma/ib: 4", "rdma/ib: 500m"), c, "K8S-POD-REQUEST", E, "no whole number");
    check("in requests", &change("limits", "requests"), c, "K8S-POD-REQUEST", E, "not in limits");
    let differs = change("{limits: {rdma/ib: 4}}", "{limits: {rdma/ib: 4}, requests: {rdma/ib: 2}}");
    check("two numbers", &differs, c, "K8S-POD-REQUEST", E, "differs");
    check("no IPC_LOCK", &change("[IPC_LOCK]", "[NET_RAW]"), c, "K8S-POD-MEMLOCK", W, "add: [IPC_LOCK]");
    check("CAP_", &change("[IPC_LOCK]", "[CAP_IPC_LOCK]"), c, "K8S-POD-MEMLOCK", E, "write IPC_LOCK");
    let user = change("spec:\n", "spec:\n  securityContext: {runAsUser: 1000}\n");
    check("another user", &user, c, "K8S-POD-MEMLOCK", W, "another user than root");
    let privileged = change("{capabilities: {add: [IPC_LOCK]}}", "{privileged: true}");
    check("privileged", &privileged, c, "K8S-POD-DEVICES", W, "every RDMA device");
    let volume = format!("{GOOD}  volumes: [{{name: d, hostPath: {{path: /dev/infiniband/}}}}]\n");
    check("a hostPath", &volume, c, "K8S-POD-DEVICES", W, "EPERM");
    check(
        "RoCE without a network",
        &change("rdma/ib: 4", "rdma/roce_bond: 2"),
        c,
        "K8S-POD-NETWORK",
        E,
        "GIDs are zero",
    );
    check("not YAML", "a: [", c, "K8S-POD-REQUEST", E, "not YAML");
    check("no pod", "kind: Service", c, "K8S-POD-REQUEST", E, "no pod");
    let no_request = privileged.replace("rdma/ib: 4", "cpu: 4");
    let found = explain_pods(&no_request, "pod.yaml", c);
    assert!(found.iter().all(|f| f.id == "K8S-POD-DEVICES"), "privileged without a request: {found:#?}");
    let none = PodContext { config: PluginConfig { update_interval: None, resources: Vec::new() }, nodes: Vec::new() };
    check("no resource at all", GOOD, &none, "K8S-POD-REQUEST", E, "the configuration has no resource");
    let plain = PodContext { nodes: vec![node(&hosts::plain())], ..gb200.clone() };
    check("a node without", GOOD, &plain, "K8S-POD-REQUEST", E, "no node has a usable rdma/ib");
}

#[test]
fn templates_and_attachments_are_found() {
    let gb200 = context(&hosts::gb200());
    let with = |kind: &str, master: &str| {
        format!(
            "apiVersion: apps/v1
kind: Deployment
metadata: {{name: web}}
spec:
  template:
    metadata:
      annotations: {{k8s.v1.cni.cncf.io/networks: 'default/net1@rdma0'}}
    spec:
      containers:
      - name: main
        securityContext: {{capabilities: {{add: [IPC_LOCK]}}}}
        resources: {{limits: {{rdma/roce_bond: 1}}}}
---
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {{name: net1}}
spec:
  config: '{{\"type\": \"{kind}\", \"master\": \"{master}\"}}'
"
        )
    };
    check("a macvlan on a bond", &with("macvlan", "bond0"), &gb200, "K8S-MATCH", I, "mlx5_bond_0");
    check("macvlan on InfiniBand", &with("macvlan", "ibp3s0"), &gb200, "K8S-POD-NETWORK", E, "the kernel refuses it");
    check("no RDMA below", &with("ipvlan", "eth0"), &gb200, "K8S-POD-NETWORK", E, "has no RDMA device");
    check("a bridge", &with("bridge", ""), &gb200, "K8S-POD-NETWORK", E, "not on an RDMA device");
    check("IPoIB on Ethernet", &with("ipoib", "bond1"), &gb200, "K8S-POD-NETWORK", E, "is Ethernet");
    let elsewhere = with("macvlan", "bond0").replace("name: net1}", "name: other}");
    check("an attachment elsewhere", &elsewhere, &gb200, "K8S-POD-NETWORK", I, "not in this file");
    let host = with("macvlan", "eth0").replace("    spec:\n", "    spec:\n      hostNetwork: true\n");
    check("host network", &host, &gb200, "K8S-MATCH", I, "mlx5_bond_0");
}

/// A pod template that requests, as YAML in one line.
const TEMPLATE: &str = "{spec: {containers: [{name: main, securityContext: {capabilities: {add: [IPC_LOCK]}}, \
                        resources: {limits: {rdma/ib: 4}}}]}}";

#[test]
fn pod_templates_are_found_in_objects_of_any_kind() {
    let gb200 = context(&hosts::gb200());
    let jobs = "replicatedJobs: [{name: workers, template: {spec: {template: TEMPLATE}}}]";
    for (kind, spec, roles) in [
        (
            "PyTorchJob",
            "pytorchReplicaSpecs: {Master: {template: TEMPLATE}, Worker: {template: TEMPLATE}}",
            &["Master", "Worker"][..],
        ),
        (
            "MPIJob",
            "mpiReplicaSpecs: {Launcher: {template: TEMPLATE}, Worker: {template: TEMPLATE}}",
            &["Launcher", "Worker"],
        ),
        (
            "RayCluster",
            "headGroupSpec: {template: TEMPLATE}, workerGroupSpecs: [{groupName: gpu, template: TEMPLATE}]",
            &["headGroupSpec", "gpu"],
        ),
        ("JobSet", jobs, &["workers"]),
        (
            "LeaderWorkerSet",
            "leaderWorkerTemplate: {leaderTemplate: TEMPLATE, workerTemplate: TEMPLATE}",
            &["leaderTemplate", "workerTemplate"],
        ),
        ("Job", "tasks: [{name: ps, template: TEMPLATE}, {name: worker, template: TEMPLATE}]", &["ps", "worker"]),
    ] {
        let spec = spec.replace("TEMPLATE", TEMPLATE);
        let manifest = format!("kind: {kind}\nmetadata: {{name: j}}\nspec: {{{spec}}}\n");
        let found = explain_pods(&manifest, "job.yaml", &gb200);
        for role in roles {
            let subject = format!("{kind}/j {role} container main");
            assert!(found.iter().any(|f| f.id == "K8S-MATCH" && f.subject == subject), "{subject}: {found:#?}");
        }
        assert!(found.iter().all(|f| f.severity != E), "{kind}: {found:#?}");
    }
}

#[test]
fn a_launcher_without_a_request_is_no_error_and_a_request_without_limits_is_one() {
    let gb200 = context(&hosts::gb200());
    let launcher = "{spec: {containers: [{name: main}]}}";
    let job = |worker: &str| {
        format!(
            "kind: MPIJob\nmetadata: {{name: j}}\nspec: {{mpiReplicaSpecs: {{Launcher: {{template: {launcher}}}, Worker: {{template: \
             {worker}}}}}}}\n"
        )
    };
    check("a launcher", &job(TEMPLATE), &gb200, "K8S-POD-REQUEST", I, "right for a launcher");
    assert!(explain_pods(&job(TEMPLATE), "", &gb200).iter().all(|f| f.severity != E));
    check("no request at all", &job(launcher), &gb200, "K8S-POD-REQUEST", E, "no container requests");
    let requests = TEMPLATE.replace("limits", "requests").replace("IPC_LOCK", "SYS_TIME");
    check("requests alone", &job(&requests), &gb200, "K8S-POD-REQUEST", E, "in requests and not in limits");
    let found = explain_pods(&job(&requests), "", &gb200);
    assert!(found.iter().any(|f| f.id == "K8S-POD-MEMLOCK" && f.severity == W), "examined all the same: {found:#?}");
    assert!(!found.iter().any(|f| f.severity == E && f.evidence.contains("no container requests")), "{found:#?}");
}

#[test]
fn networks_of_operators_are_attachments() {
    let gb200 = context(&hosts::gb200());
    let with = |kind: &str, spec: &str, request: &str| {
        let pod = GOOD
            .replace("{rdma/ib: 4}", request)
            .replace("{name: train}", "{name: train, annotations: {k8s.v1.cni.cncf.io/networks: net1}}");
        format!("{pod}---\nkind: {kind}\nmetadata: {{name: net1}}\nspec: {spec}\n")
    };
    let quiet = |manifest: &str| {
        let found = explain_pods(manifest, "pod.yaml", &gb200);
        assert!(found.iter().all(|f| f.id == "K8S-MATCH" || f.severity == I), "{manifest}: {found:#?}");
        assert!(!found.iter().any(|f| f.evidence.contains("not in this file")), "{manifest}: {found:#?}");
    };
    quiet(&with("IPoIBNetwork", "{master: ibp3s0}", "{rdma/ib: 4}"));
    let macvlan = |master: &str| with("MacvlanNetwork", &format!("{{master: {master}, mode: bridge}}"), "{rdma/ib: 4}");
    check("a macvlan on InfiniBand", &macvlan("ibp3s0"), &gb200, "K8S-POD-NETWORK", E, "the kernel refuses it");
    let device = |request: &str| with("HostDeviceNetwork", "{resourceName: hostdev}", request);
    check(
        "no request",
        &device("{rdma/ib: 4}"),
        &gb200,
        "K8S-POD-NETWORK",
        W,
        "resource hostdev, and no container requests it",
    );
    let found = explain_pods(&device("{rdma/ib: 4, nvidia.com/hostdev: 1}"), "pod.yaml", &gb200);
    assert!(found.iter().all(|f| f.severity == I), "{found:#?}");
}

/// A pod with a request, and macvlans or IPoIB children on interfaces.
fn attached(request: &str, masters: &[&str]) -> String {
    let names: Vec<String> = masters.iter().map(|m| format!("on-{}", m.to_lowercase())).collect();
    let networks = names.join(",");
    let mut text = GOOD.replace("{rdma/ib: 4}", request).replace(
        "{name: train}",
        &format!("{{name: train, annotations: {{k8s.v1.cni.cncf.io/networks: '{networks}'}}}}"),
    );
    for (name, master) in names.iter().zip(masters) {
        let kind = if master.starts_with("ib") { "ipoib" } else { "macvlan" };
        text += &format!(
            "---\napiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata: {{name: {name}}}\n\
             spec:\n  config: '{{\"type\": \"{kind}\", \"master\": \"{master}\"}}'\n"
        );
    }
    text
}

#[test]
fn attachments_are_compared_with_the_hcas_that_a_pod_may_get() {
    let gb200 = context(&hosts::gb200());
    let case = |request: &str, masters: &[&str], severity, part: &str| {
        let what = format!("{request} on {masters:?}");
        check(&what, &attached(request, masters), &gb200, "K8S-POD-NETWORK", severity, part);
    };
    case(
        "{rdma/roce_bond: 1}",
        &["bond0"],
        W,
        "gets 1 of 2 HCAs of rdma/roce_bond and has an interface on mlx5_bond_0 only",
    );
    case("{rdma/roce_bond: 1}", &["bond1"], W, "with mlx5_bond_0 all GIDs are zero");
    // The remedy names a resource per rail.
    case("{rdma/roce_bond: 1}", &["bond0"], W, "roce_bond_bond1 with ifNames [\"enP22p3s0f0np0\"]");
    case(
        "{rdma/roce_bond: 2}",
        &["bond0"],
        W,
        "it gets all HCAs of rdma/roce_bond and has no interface on mlx5_bond_1",
    );
    case("{rdma/roce_bond: 1}", &["ibp3s0"], E, "none of the HCAs that rdma/roce_bond gives on gb200-01 is there");
    case("{rdma/ib: 1}", &["ibp3s0"], I, "it may get mlx5_1, mlx5_4, mlx5_5");
    let quiet = |request: &str, masters: &[&str]| {
        let found = explain_pods(&attached(request, masters), "pod.yaml", &gb200);
        assert!(found.iter().all(|f| f.id == "K8S-MATCH"), "{request} on {masters:?}: {found:#?}");
    };
    quiet("{rdma/roce_bond: 1}", &["bond0", "bond1"]);
    quiet("{rdma/roce_bond: 2}", &["bond1", "bond0"]);
    quiet("{rdma/ib: 4}", &["ibp3s0", "ibP2p3s0", "ibP16p3s0", "ibP18p3s0"]);
    // With an entry for each rail the same pod has nothing to fear.
    let entry = |name: &str, interface: &str| {
        format!(
            "{{\"resourceName\": \"{name}\", \"rdmaHcaMax\": 8, \"selectors\": {{\"ifNames\": [\"{interface}\"]}}}}"
        )
    };
    let text = format!("{{\"configList\": [{}, {}]}}", entry("r0", "enP6p3s0f0np0"), entry("r1", "enP22p3s0f0np0"));
    let split = PodContext { config: read_config(&text, "").config.unwrap(), ..gb200.clone() };
    let found = explain_pods(&attached("{rdma/r0: 1}", &["bond0"]), "pod.yaml", &split);
    assert!(found.iter().all(|f| f.id == "K8S-MATCH"), "{found:#?}");
    check(
        "the other rail",
        &attached("{rdma/r1: 1}", &["bond0"]),
        &split,
        "K8S-POD-NETWORK",
        E,
        "attach a macvlan or ipvlan on bond1",
    );
}

#[test]
fn multus_is_needed_where_addresses_are() {
    let nodes = [node(&hosts::gb200())];
    let answer = |usage, isolation| -> Vec<(&'static str, bool, usize)> {
        let advice = advise(&nodes, usage, isolation);
        advice.networks.iter().map(|n| (n.attachment, n.multus, n.manifests.len())).collect()
    };
    let shared = PodIsolation::Shared;
    assert_eq!(answer(RdmaUse::Verbs, shared), [("none", false, 0), ("macvlan", true, 2)]);
    assert_eq!(answer(RdmaUse::ConnectionManager, shared), [("ipoib", true, 4), ("macvlan", true, 2)]);
    assert_eq!(answer(RdmaUse::Verbs, PodIsolation::HostNetwork), [("host-network", false, 0); 2]);
    let divided = [("sr-iov", true, 8), ("sr-iov", true, 4)];
    assert_eq!(answer(RdmaUse::Verbs, PodIsolation::VirtualFunction), divided, "two objects for each rail");
    let roce = advise(&nodes, RdmaUse::Verbs, shared);
    assert!(roce.networks[1].manifests[0].contains("\"master\": \"bond0\""), "{:?}", roce.networks[1]);
    let none = advise(&[node(&hosts::plain())], RdmaUse::Verbs, shared);
    assert!(!none.multus && none.networks.is_empty() && none.notes[0].contains("TCP"));
}

#[test]
fn an_hca_in_planes_has_an_attachment_for_each() {
    let advice = advise(&[node(&hosts::planes())], RdmaUse::Verbs, PodIsolation::Shared);
    let network = &advice.networks[0];
    assert_eq!(network.interfaces["planes-01"], ["eth_p0", "eth_p1", "eth_p2", "eth_p3"]);
    assert!(network.manifests.len() == 4 && network.reasons.iter().any(|r| r.contains("in planes")), "{network:?}");
}

#[test]
fn each_rail_has_a_subnet_of_its_own() {
    let advice = advise(&[node(&hosts::gb200())], RdmaUse::ConnectionManager, PodIsolation::Shared);
    let manifests: Vec<&String> = advice.networks.iter().flat_map(|n| &n.manifests).collect();
    let subnets: std::collections::BTreeSet<&str> =
        manifests.iter().filter_map(|m| m.split("\"range\": \"").nth(1)?.split('"').next()).collect();
    assert_eq!((manifests.len(), subnets.len()), (6, 6), "{manifests:?}");
}

#[test]
fn virtual_functions_are_made_of_what_can_be_divided() {
    let divide = |made: Made| advise(&[node(&made)], RdmaUse::Verbs, PodIsolation::VirtualFunction);
    // Two kinds of network on one card of another vendor: two policies, each for its own function.
    let e810 = divide(hosts::e810());
    let manifests: Vec<&String> = e810.networks.iter().flat_map(|n| &n.manifests).collect();
    let names: std::collections::BTreeSet<(&str, &str)> = manifests
        .iter()
        .filter_map(|m| Some((m.split("kind: ").nth(1)?.lines().next()?, m.split("name: ").nth(1)?.lines().next()?)))
        .collect();
    assert_eq!(
        names.into_iter().collect::<Vec<_>>(),
        [
            ("SriovNetwork", "rdma-ens3f0-vf"),
            ("SriovNetwork", "rdma-ens3f1-vf"),
            ("SriovNetworkNodePolicy", "rdma-ens3f0-vf"),
            ("SriovNetworkNodePolicy", "rdma-ens3f1-vf"),
        ]
    );
    assert_eq!(manifests.len(), 4);
    assert!(manifests[0].contains("vendor: \"8086\"\n    pfNames: [\"ens3f1\"]"), "{}", manifests[0]);
    assert!(manifests.iter().filter(|m| m.contains("{\"type\": \"rdma\"}")).count() == 2, "{manifests:?}");
    assert!(e810.manifests[0].contains("rdmaMode: exclusive"), "{:?}", e810.manifests);
    let ib = divide(hosts::gb200());
    assert!(ib.networks[0].manifests[1].contains("kind: SriovIBNetwork"), "{:?}", ib.networks[0].manifests);
    assert!(ib.networks[0].manifests[0].contains("linkType: IB"), "{:?}", ib.networks[0].manifests);
    for (made, reason) in [
        (hosts::cloud_ipoib(), "virtual functions already"),
        (hosts::efa(), "no virtual functions can be made"),
        (hosts::soft_roce(), "no virtual functions can be made"),
    ] {
        let advice = divide(made);
        let network = &advice.networks[0];
        assert_eq!((network.attachment, network.manifests.len(), advice.manifests.len()), ("none", 0, 0));
        assert!(network.reasons[0].contains(reason), "{:?}", network.reasons);
        assert!(advice.notes.is_empty(), "nothing needs exclusive mode: {:?}", advice.notes);
    }
}

/// A pod with a claim, the claim's template and its class.
const CLAIM: &str = "
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: nics}
spec: {selectors: [{cel: {expression: \"device.driver == 'dra.net'\"}}]}
---
kind: ResourceClaimTemplate
metadata: {name: two-rails}
spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nics, count: 2, selectors: [{cel: {expression: \"device.attributes['dra.net'].rdma == true\"}}]}}]}}}
---
kind: Pod
metadata: {name: trainer}
spec:
  resourceClaims: [{name: rails, resourceClaimTemplateName: two-rails}]
  containers:
  - name: main
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    resources: {claims: [{name: rails}]}
";

#[test]
fn claims_are_judged_by_what_the_file_has() {
    let gb200 = context(&hosts::gb200());
    let c = &gb200;
    let change = |from: &str, to: &str| {
        assert!(CLAIM.contains(from), "{from}");
        CLAIM.replace(from, to)
    };
    let found = explain_pods(CLAIM, "pod.yaml", c);
    assert!(found.iter().all(|f| f.id == "K8S-MATCH"), "{found:#?}");
    check("a claim", CLAIM, c, "K8S-MATCH", I, "2 devices of the class nics with RDMA by the driver dra.net");
    let elsewhere = change("{name: two-rails}", "{name: other}");
    check(
        "a template elsewhere",
        &elsewhere,
        c,
        "K8S-POD-REQUEST",
        I,
        "not judged: the ResourceClaimTemplate two-rails",
    );
    let unknown =
        change("device.driver == 'dra.net'", "device.driver == 'a.com'").replace("'dra.net'].rdma", "'a.com'].fast");
    check("an unknown driver", &unknown, c, "K8S-POD-REQUEST", I, "not judged: nothing says");
    let no_class = unknown.replace("{name: nics}", "{name: others}");
    check("a class elsewhere", &no_class, c, "K8S-POD-REQUEST", I, "the DeviceClass nics is not in this file");
    let any = change("'dra.net'].rdma == true", "'dra.net'].mtu > 1500");
    check("any network device", &any, c, "K8S-POD-REQUEST", W, "no selector requires RDMA");
    let none = change("rdma == true", "rdma == false");
    check("devices without RDMA", &none, c, "K8S-POD-REQUEST", E, "no container requests");
    check("too many", &change("count: 2", "count: 20"), c, "K8S-NO-MATCH", W, "at most 6 each");
    let host = change("spec:\n  resourceClaims", "spec:\n  hostNetwork: true\n  resourceClaims");
    check("the host's network", &host, c, "K8S-POD-NETWORK", E, "can't claim");
    check("no such claim", &change("[{name: rails}]", "[{name: rail}]"), c, "K8S-POD-REQUEST", E, "does not have");
    let request = change("[{name: rails}]", "[{name: rails, request: x}]");
    check("no such request", &request, c, "K8S-POD-REQUEST", E, "has none of that name");
    check("no IPC_LOCK", &change("[IPC_LOCK]", "[NET_RAW]"), c, "K8S-POD-MEMLOCK", W, "no capability IPC_LOCK");
    // A driver of network devices gives them to the whole pod.
    let unreferred = change("    resources: {claims: [{name: rails}]}\n", "");
    check("a claim of the pod", &unreferred, c, "K8S-MATCH", I, "2 devices");
    // The form before Kubernetes 1.34, a claim of its own, alternatives, all devices.
    let requests = "{name: nic, exactly: {deviceClassName: nics, count: 2, selectors: [{cel: {expression: \"device.attributes['dra.net'].rdma == true\"}}]}}";
    for (form, part) in [
        ("{name: nic, deviceClassName: rdma-nics}", "a device of the class rdma-nics"),
        (
            "{name: nic, exactly: {deviceClassName: rdma-nics, allocationMode: All}}",
            "all devices of the class rdma-nics",
        ),
        (
            "{name: nic, firstAvailable: [{name: a, deviceClassName: rdma-a}, {name: b, deviceClassName: rdma-b}]}",
            "rdma-b",
        ),
    ] {
        check(form, &change(requests, form), c, "K8S-MATCH", I, part);
    }
    let own = change("resourceClaimTemplateName", "resourceClaimName")
        .replace("kind: ResourceClaimTemplate", "kind: ResourceClaim")
        .replace("spec: {spec: {devices", "spec: {devices")
        .replace("]}}]}}}", "]}}]}}");
    check("a claim of its own", &own, c, "K8S-MATCH", I, "2 devices");
    let parts = CLAIM.split("---\nkind: Pod").next().unwrap();
    check("no pod yet", parts, c, "K8S-POD-REQUEST", I, "no pod to compare");
}

/// A pod with functions of an SR-IOV resource, the policy and the network.
const FUNCTIONS: &str = "
apiVersion: sriovnetwork.openshift.io/v1
kind: SriovNetworkNodePolicy
metadata: {name: rail0}
spec: {resourceName: rail0_vf, numVfs: 8, nicSelector: {pfNames: ['ens1f0np0']}, linkType: ETH, isRdma: true}
---
kind: SriovNetwork
metadata: {name: rail0}
spec: {resourceName: rail0_vf, networkNamespace: default, metaPlugins: '{\"type\": \"rdma\"}'}
---
kind: SriovNetworkPoolConfig
metadata: {name: pool}
spec: {rdmaMode: exclusive}
---
kind: Pod
metadata: {name: vf, annotations: {k8s.v1.cni.cncf.io/networks: rail0}}
spec:
  containers:
  - name: main
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    resources: {limits: {nvidia.com/rail0_vf: 1}}
";

#[test]
fn resources_of_functions_are_judged_by_policy_and_network() {
    let roce = context(&hosts::roce_jumbo());
    let c = &roce;
    let change = |from: &str, to: &str| {
        assert!(FUNCTIONS.contains(from), "{from}");
        FUNCTIONS.replace(from, to)
    };
    let found = explain_pods(FUNCTIONS, "pod.yaml", c);
    assert!(found.iter().all(|f| f.id == "K8S-MATCH"), "{found:#?}");
    check("a function", FUNCTIONS, c, "K8S-MATCH", I, "it gets a function of ens1f0np0, with RDMA");
    let plain = change(", isRdma: true", "");
    check("no RDMA", &plain, c, "K8S-POD-REQUEST", E, "no isRdma: true");
    let vfio = change("isRdma: true", "isRdma: true, deviceType: vfio-pci");
    check("user space", &vfio, c, "K8S-POD-REQUEST", E, "vfio-pci");
    let many = change("rail0_vf: 1}", "rail0_vf: 9}");
    check("too many", &many, c, "K8S-POD-REQUEST", E, "a node has 8: it stays Pending");
    let range = many.replace("['ens1f0np0']", "['ens1f0np0#0-3', 'ens2f0np0#4-7']");
    check("two ranges", &range, c, "K8S-POD-REQUEST", E, "a node has 8");
    let other = change("ens1f0np0", "ens9");
    check("another node's card", &other, c, "K8S-NO-MATCH", I, "none of the nodes here has ens9");
    let unattached = change(", annotations: {k8s.v1.cni.cncf.io/networks: rail0}", "");
    check("no attachment", &unattached, c, "K8S-POD-NETWORK", E, "all GIDs are zero");
    check("InfiniBand", &unattached.replace("ETH", "IB"), c, "K8S-POD-NETWORK", I, "verbs with LIDs work");
    let twice = change("networks: rail0", "networks: 'rail0,rail0@net2'");
    check("two interfaces", &twice, c, "K8S-POD-NETWORK", W, "2 attachments take an interface");
    let alone = change(", metaPlugins: '{\"type\": \"rdma\"}'", "");
    check("no RDMA CNI", &alone, c, "K8S-POD-NETWORK", E, "the RDMA device stays on the node");
    let shared = change("exclusive", "shared");
    check("a shared pool", &shared, c, "K8S-POD-NETWORK", E, "refuses nodes in shared mode");
    let unplanned = change("SriovNetworkPoolConfig", "ConfigMap");
    check("nodes in shared mode", &unplanned, c, "K8S-POD-NETWORK", W, "refuses nodes in shared mode");
    let elsewhere = change("SriovNetworkNodePolicy", "ConfigMap");
    check("a policy elsewhere", &elsewhere, c, "K8S-POD-REQUEST", I, "was not judged");
    // The list of the device plugin itself, and an attachment with the resource in an annotation.
    let list = "kind: ConfigMap\nmetadata: {name: sriovdp}\ndata:\n  config.json: '{\"resourceList\": [{\"resourceName\": \"rail0_vf\", \
                \"selectors\": {\"pfNames\": [\"ens1f0np0#1-2\"], \"isRdma\": true}}]}'\n";
    let listed = format!("{}---\n{list}", elsewhere.replace("kind: ConfigMap", "kind: Other"));
    check("the plugin's list", &listed, c, "K8S-MATCH", I, "by ConfigMap/sriovdp");
    check(
        "without RDMA",
        &listed.replace("\"isRdma\": true", "\"isRdma\": false"),
        c,
        "K8S-POD-REQUEST",
        E,
        "no isRdma",
    );
    let annotated = change(
        "kind: SriovNetwork\nmetadata: {name: rail0}",
        "kind: NetworkAttachmentDefinition\nmetadata: {name: rail0, \
                            annotations: {k8s.v1.cni.cncf.io/resourceName: nvidia.com/rail0_vf}}",
    )
    .replace(
        "metaPlugins: '{\"type\": \"rdma\"}'",
        "config: '{\"plugins\": [{\"type\": \"sriov\"}, {\"type\": \"rdma\"}]}'",
    );
    let found = explain_pods(&annotated, "pod.yaml", c);
    assert!(found.iter().all(|f| f.id == "K8S-MATCH"), "{found:#?}");
}

/// A pod that uses each network that the advice made, with a request for each resource.
fn pod_of_advice(manifests: &[String]) -> String {
    let first =
        |text: &str, key: &str| text.split(key).nth(1).map(|rest| rest.lines().next().unwrap().trim().to_owned());
    let named = manifests.iter().filter(|m| !m.contains("NodePolicy") && !m.contains("PoolConfig"));
    let networks: Vec<String> = named.filter_map(|m| first(m, "\n  name:")).collect();
    let policies = manifests.iter().filter(|m| m.contains("NodePolicy"));
    let resources: Vec<String> =
        policies.filter_map(|m| first(m, "resourceName:")).map(|r| format!("openshift.io/{r}: 1")).collect();
    GOOD.replace("{rdma/ib: 4}", &format!("{{{}}}", resources.join(", "))).replace(
        "{name: train}",
        &format!("{{name: train, annotations: {{k8s.v1.cni.cncf.io/networks: '{}'}}}}", networks.join(",")),
    )
}

#[test]
fn advice_passes_explain() {
    for (name, made) in hosts::all() {
        let nodes = [node(&made)];
        if nodes[0].hcas.is_empty() {
            continue;
        }
        let context = context(&made);
        for isolation in [PodIsolation::Shared, PodIsolation::VirtualFunction] {
            let advice = advise(&nodes, RdmaUse::ConnectionManager, isolation);
            let of_networks = advice.networks.iter().flat_map(|network| &network.manifests);
            let manifests: Vec<String> = advice.manifests.iter().chain(of_networks).cloned().collect();
            if manifests.is_empty() {
                continue;
            }
            let objects = manifests.join("---\n");
            let found = explain_pods(&objects, "advice.yaml", &context);
            assert!(found.iter().all(|f| f.severity == I), "{name}: {found:#?}");
            if isolation == PodIsolation::VirtualFunction {
                let found =
                    explain_pods(&format!("{objects}---{}", pod_of_advice(&manifests)), "advice.yaml", &context);
                assert!(found.iter().all(|f| f.id == "K8S-MATCH"), "{name}: {found:#?}");
            }
        }
    }
}

proptest::proptest! {
    #[test]
    fn no_manifest_makes_it_panic(text in "(kind: (Pod|List|CronJob)\n)?(spec: )?\\PC{0,120}") {
        let context = PodContext { config: read_config("{\"configList\":[{\"resourceName\":\"x\",\"devices\":[\"a\"]}]}", "").config.unwrap(), nodes: Vec::new() };
        let _ = explain_pods(&text, "x", &context);
    }
}
