//! Whether a pod will get working RDMA: request, network, locked memory and devices, by the manifest, the configuration of the
//! plugin and the nodes. Talks to no cluster.

use crate::claims::ClaimObjects;
use crate::config::{PluginConfig, ResourceConfig};
use crate::functions::{FunctionPolicy, FunctionRequest, without_prefix};
use crate::hca::{Hca, HcaLink, NodeHcas};
use crate::lint::entries_per_hca;
use crate::select::select_hcas;
use crate::verify::MEMLOCK_REMEDY;
use serde_json::{Value, json};
use spurline_config::values::nearest_word;
use spurline_fabric::finding::id;
use spurline_fabric::{HostFinding, Severity};
use std::collections::{BTreeMap, BTreeSet};

/// Prefix of the reference's resources, recognised also when no entry has the name.
const RDMA_PREFIX: &str = "rdma/";
/// Multus reads this annotation.
const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";
/// The annotation of an attachment that takes interfaces from a resource's devices.
const RESOURCE_ANNOTATION: &str = "k8s.v1.cni.cncf.io/resourceName";
/// Kinds of operators that make a NetworkAttachmentDefinition of the same name, and the type of CNI there.
const NETWORK_KINDS: [(&str, &str); 6] = [
    ("IPoIBNetwork", "ipoib"),
    ("MacvlanNetwork", "macvlan"),
    ("HostDeviceNetwork", "host-device"),
    ("SriovNetwork", "sriov"),
    ("SriovIBNetwork", "ib-sriov"),
    ("OVSNetwork", "ovs"),
];
/// Keys on the way to a pod template that do not name the role.
const TEMPLATE_KEYS: [&str; 3] = ["spec", "template", "jobTemplate"];
/// Keys of list items that name a role.
const ROLE_KEYS: [&str; 2] = ["name", "groupName"];

/// What a pod is compared with.
#[derive(Debug, Clone)]
pub struct PodContext {
    /// The plugin's configuration.
    pub config: PluginConfig,
    /// The nodes where the pod may run.
    pub nodes: Vec<NodeHcas>,
}

/// Examines the pods of a manifest: pods, or objects with a pod template.
pub fn explain_pods(manifest: &str, file: &str, context: &PodContext) -> Vec<HostFinding> {
    let documents: Vec<Value> = match serde_saphyr::from_multiple(manifest) {
        Ok(documents) => documents,
        Err(error) => {
            let evidence = format!("it is not YAML: {}", error.to_string().lines().next().unwrap_or_default());
            let remedy = "correct the named line; `kubectl apply --dry-run=client -f` reports the same";
            return vec![HostFinding::new(id::K8S_POD_REQUEST, Severity::Error, file, evidence, remedy)];
        }
    };
    let mut manifest = PodManifest::default();
    documents.iter().for_each(|document| manifest.add_object(document));
    if manifest.pods.is_empty() && manifest.has_parts() {
        let evidence = "it has networks, policies or claims, and no pod to compare them with";
        let remedy = "append a pod that uses them";
        return vec![HostFinding::new(id::K8S_POD_REQUEST, Severity::Info, file, evidence, remedy)];
    }
    if manifest.pods.is_empty() {
        let evidence = "it has no pod and no object with a pod template";
        let remedy = "give a manifest of a Pod, of a Deployment, Job, PyTorchJob, MPIJob, RayCluster, JobSet or any other object with \
                      pod templates";
        return vec![HostFinding::new(id::K8S_POD_REQUEST, Severity::Error, file, evidence, remedy)];
    }
    let mut findings = Vec::new();
    for pod in &manifest.pods {
        PodExamination { pod, manifest: &manifest, context, findings: &mut findings }.examine();
    }
    findings.sort_by_key(|f| f.severity);
    findings
}

/// The objects of a manifest that matter here.
#[derive(Default)]
pub(crate) struct PodManifest {
    pods: Vec<PodObject>,
    /// By name of the NetworkAttachmentDefinition.
    pub(crate) attachments: BTreeMap<String, NetworkAttachment>,
    /// What makes the resources of the SR-IOV network device plugin.
    pub(crate) policies: Vec<FunctionPolicy>,
    /// Whether a pool's nodes are to have RDMA devices that are exclusive to a namespace.
    pub(crate) is_exclusive: Option<bool>,
    claims: ClaimObjects,
    /// Number of objects that were searched for pod templates.
    owners: usize,
}

/// The known facts of a network attachment.
#[derive(Clone, Default)]
pub(crate) struct NetworkAttachment {
    /// The configuration of the CNI.
    config: Value,
    /// The resource of the attached devices, with or without prefix.
    pub(crate) resource: Option<String>,
    /// Whether the RDMA CNI moves the RDMA device into the pod.
    pub(crate) moves_device: bool,
}

pub(crate) struct PodObject {
    /// Number of the object that has the template; all templates of an object have the same.
    owner: usize,
    /// `Deployment/name`, `PyTorchJob/name Worker`.
    pub(crate) label: String,
    annotations: Value,
    spec: Value,
}

impl PodManifest {
    fn add_object(&mut self, object: &Value) {
        let kind = object["kind"].as_str().unwrap_or_default();
        let name = object["metadata"]["name"].as_str().unwrap_or("unnamed");
        let spec = &object["spec"];
        if kind == "List" {
            object["items"].as_array().into_iter().flatten().for_each(|item| self.add_object(item));
        } else if kind == "NetworkAttachmentDefinition" {
            let config: Option<Value> = spec["config"].as_str().and_then(|text| serde_json::from_str(text).ok());
            let config = config.unwrap_or_default();
            let plugins = config["plugins"].as_array().into_iter().flatten();
            let moves_device = plugins.chain([&config]).any(|plugin| plugin["type"] == "rdma");
            let resource = object["metadata"]["annotations"][RESOURCE_ANNOTATION].as_str().map(str::to_owned);
            self.attachments.insert(name.to_owned(), NetworkAttachment { config, resource, moves_device });
        } else if let Some((_, cni)) = NETWORK_KINDS.iter().find(|(known, _)| *known == kind) {
            let config = json!({ "type": cni, "master": spec["master"] });
            let resource = spec["resourceName"].as_str().map(str::to_owned);
            // A text with an object, or several with commas between.
            let chained: String = spec["metaPlugins"].as_str().unwrap_or_default().split_whitespace().collect();
            let moves_device = chained.contains("\"type\":\"rdma\"");
            self.attachments.insert(name.to_owned(), NetworkAttachment { config, resource, moves_device });
        } else if kind == "SriovNetworkNodePolicy" {
            self.policies.extend(FunctionPolicy::of_operator(name, spec));
        } else if kind == "SriovNetworkPoolConfig" {
            let mode = spec["rdmaMode"].as_str();
            self.is_exclusive = mode.map(|mode| mode == "exclusive").or(self.is_exclusive);
        } else if !self.claims.add(kind, name, spec) {
            self.policies.extend(FunctionPolicy::of_lists(object));
            self.owners += 1;
            self.add_templates(&format!("{kind}/{name}"), None, object);
        }
    }

    /// Whether there is an object that pods use.
    fn has_parts(&self) -> bool {
        !self.attachments.is_empty() || !self.policies.is_empty() || !self.claims.is_empty()
    }

    /// Whether a resource gives functions of network cards: a policy makes the resource, or an attachment takes from it.
    fn gives_functions(&self, resource: &str) -> bool {
        let name = without_prefix(resource);
        let attached = self.attachments.values().filter_map(|attachment| attachment.resource.as_deref());
        self.policies.iter().any(|policy| policy.makes(name)) || attached.map(without_prefix).any(|known| known == name)
    }

    /// Adds the pod templates at any depth of an object: any value with a list of containers in `spec`, as in a pod. `role` is
    /// the innermost key or name that distinguishes several templates.
    fn add_templates(&mut self, owner: &str, role: Option<&str>, value: &Value) {
        if value["spec"]["containers"].is_array() {
            self.pods.push(PodObject {
                owner: self.owners,
                label: role.map_or(owner.to_owned(), |role| format!("{owner} {role}")),
                annotations: value["metadata"]["annotations"].clone(),
                spec: value["spec"].clone(),
            });
            return;
        }
        match value {
            Value::Object(entries) => {
                for (key, below) in entries {
                    let is_role = !TEMPLATE_KEYS.contains(&key.as_str());
                    self.add_templates(owner, if is_role { Some(key) } else { role }, below);
                }
            }
            Value::Array(items) => {
                for item in items {
                    let name = ROLE_KEYS.iter().find_map(|key| item[*key].as_str());
                    self.add_templates(owner, name.or(role), item);
                }
            }
            _ => {}
        }
    }
}

/// Whether a container requests a resource that `is_rdma` knows, in limits or in requests.
fn requests_any(container: &Value, is_rdma: impl Fn(&str) -> bool) -> bool {
    let lists = ["limits", "requests"].map(|list| container["resources"][list].as_object());
    lists.into_iter().flatten().flatten().any(|(name, amount)| is_rdma(name) && quantity(amount) != Some(0))
}

/// The claims of a pod that may be for RDMA.
#[derive(Default)]
struct ClaimedDevices {
    /// Whether each is for network devices surely.
    claims: BTreeMap<String, bool>,
    /// Claims that a container refers to.
    referred: BTreeSet<String>,
}

impl ClaimedDevices {
    /// Whether a container gets devices of a claim: of its own claim, or of a claim that no container refers to, which drivers of
    /// network devices give to the whole pod. The value says whether these are network devices surely.
    fn given_to(&self, container: &Value) -> Option<bool> {
        let own = container["resources"]["claims"].as_array().into_iter().flatten();
        let own: Vec<&str> = own.filter_map(|reference| reference["name"].as_str()).collect();
        let claims = self.claims.iter();
        claims
            .filter(|(name, _)| own.contains(&name.as_str()) || !self.referred.contains(*name))
            .map(|(_, sure)| *sure)
            .max()
    }
}

/// A container's request, on a node that has the resource.
struct NodeRequest<'a> {
    /// The container.
    subject: String,
    resource: &'a ResourceConfig,
    count: u64,
    node: &'a NodeHcas,
    /// The possible HCAs there.
    hcas: Vec<&'a Hca>,
}

pub(crate) struct PodExamination<'a> {
    pub(crate) pod: &'a PodObject,
    pub(crate) manifest: &'a PodManifest,
    pub(crate) context: &'a PodContext,
    findings: &'a mut Vec<HostFinding>,
}

impl<'a> PodExamination<'a> {
    pub(crate) fn add(
        &mut self,
        id: &'static str,
        severity: Severity,
        subject: &str,
        evidence: String,
        remedy: impl Into<String>,
    ) {
        self.findings.push(HostFinding::new(id, severity, subject, evidence, remedy));
    }

    fn examine(mut self) {
        let spec = &self.pod.spec;
        let lists = ["initContainers", "containers"].into_iter().filter_map(|list| spec[list].as_array());
        let containers: Vec<&Value> = lists.flatten().collect();
        let mut node_requests = Vec::new();
        let mut function_requests = Vec::new();
        let mut requesting = 0;
        let claims = self.check_claims(&containers);
        for container in &containers {
            let name = container["name"].as_str().unwrap_or("unnamed");
            let subject = format!("{} container {name}", self.pod.label);
            let requests = self.requests_of(container, &subject);
            let claimed = claims.given_to(container);
            if requests.is_empty() && claimed.is_none() {
                continue;
            }
            requesting += 1;
            if !requests.is_empty() || claimed == Some(true) {
                self.check_memlock(container, &subject);
            }
            for (resource, count) in requests {
                let is_own = self.context.config.resources.iter().any(|own| own.resource() == resource);
                if !is_own && self.manifest.gives_functions(&resource) {
                    function_requests.push(self.check_function_request(&subject, &resource, count));
                } else if let Some(class) = self.manifest.claims.class_of_resource(&resource).filter(|_| !is_own) {
                    let evidence = format!("{resource} stands for devices of the class {class}, which were not judged");
                    let remedy = "claim them in the pod (resourceClaims), which this command judges";
                    self.add(id::K8S_POD_REQUEST, Severity::Info, &subject, evidence, remedy);
                } else {
                    node_requests.extend(self.check_request(&subject, &resource, count));
                }
            }
        }
        // A privileged container has all device nodes without a request.
        if requesting == 0 && !containers.iter().any(|container| is_privileged(container)) {
            let known: Vec<String> = self.context.config.resources.iter().map(ResourceConfig::resource).collect();
            let evidence = "no container requests an RDMA resource, so none gets a device node".to_owned();
            let remedy = format!("write resources: {{limits: {{{}: 1}}}}", known.first().map_or("rdma/NAME", |n| n));
            let label = self.pod.label.clone();
            // The launcher of a job moves no data.
            if self.has_requesting_sibling() {
                let remedy = format!("right for a launcher, a head or a driver that moves no data; else {remedy}");
                self.add(id::K8S_POD_REQUEST, Severity::Info, &label, evidence, remedy);
            } else {
                self.add(id::K8S_POD_REQUEST, Severity::Error, &label, evidence, remedy);
            }
        } else {
            self.check_network(&node_requests, &function_requests);
        }
        self.check_devices(&containers);
    }

    /// Judges the claims of the pod, and the references of the containers.
    fn check_claims(&mut self, containers: &[&Value]) -> ClaimedDevices {
        let is_on_host = self.pod.spec["hostNetwork"] == true;
        let claims = self.manifest.claims.of_pod(&self.pod.spec);
        let mut devices = ClaimedDevices::default();
        for claim in &claims {
            self.findings.extend(claim.judge(&self.pod.label, is_on_host, &self.context.nodes));
            if claim.may_be_rdma() {
                devices.claims.insert(claim.name.clone(), claim.is_network());
            }
        }
        for container in containers {
            let name = container["name"].as_str().unwrap_or("unnamed");
            let subject = format!("{} container {name}", self.pod.label);
            for reference in container["resources"]["claims"].as_array().into_iter().flatten() {
                let wanted = reference["name"].as_str().unwrap_or_default();
                devices.referred.insert(wanted.to_owned());
                let known = claims.iter().find(|claim| claim.name == wanted);
                let request = reference["request"].as_str();
                let evidence = match (known, request) {
                    (None, _) => format!(
                        "it refers to the claim {wanted}, which the pod does not have: the API server refuses it"
                    ),
                    (Some(claim), Some(request)) if claim.lacks_request(request) => {
                        format!("it refers to the request {request} of the claim {wanted}, which has none of that name")
                    }
                    _ => continue,
                };
                let remedy = "name a claim of the pod's resourceClaims, and a request of that claim";
                self.add(id::K8S_POD_REQUEST, Severity::Error, &subject, evidence, remedy);
            }
        }
        devices
    }

    /// `the configuration has rdma/ib, rdma/roce`.
    fn known_resources(&self) -> String {
        let known: Vec<String> = self.context.config.resources.iter().map(ResourceConfig::resource).collect();
        if known.is_empty() {
            "the configuration has no resource: no node here has an RDMA device (`spurline k8s discover`)".to_owned()
        } else {
            format!("the configuration has {}", known.join(", "))
        }
    }

    /// Whether a resource is for RDMA: the configuration makes it, or the name says so.
    fn is_rdma(&self, name: &str) -> bool {
        let mut resources = self.context.config.resources.iter();
        name.starts_with(RDMA_PREFIX)
            || resources.any(|resource| resource.resource() == name)
            || self.manifest.gives_functions(name)
            || self.manifest.claims.class_of_resource(name).is_some()
    }

    /// Whether another pod template of the same object requests an RDMA resource.
    fn has_requesting_sibling(&self) -> bool {
        let siblings = self.manifest.pods.iter().filter(|pod| pod.owner == self.pod.owner);
        let mut containers = siblings.filter_map(|pod| pod.spec["containers"].as_array()).flatten();
        containers.any(|container| requests_any(container, |name| self.is_rdma(name)))
    }

    /// The RDMA resources of a container, from `limits`; resources in `requests` alone are an error, and are examined all the
    /// same.
    fn requests_of(&mut self, container: &Value, subject: &str) -> Vec<(String, u64)> {
        let limits = &container["resources"]["limits"];
        let requests = &container["resources"]["requests"];
        let names = |list: &Value| -> BTreeSet<String> {
            list.as_object().into_iter().flatten().map(|(k, _)| k.clone()).filter(|k| self.is_rdma(k)).collect()
        };
        let limited = names(limits);
        let requested = names(requests);
        let mut found = Vec::new();
        for name in requested.difference(&limited) {
            let evidence = format!("{name} is in requests and not in limits: the API server refuses the pod");
            self.add(id::K8S_POD_REQUEST, Severity::Error, subject, evidence, format!("move {name} to limits"));
            found.extend(quantity(&requests[name]).filter(|count| *count > 0).map(|count| (name.clone(), count)));
        }
        for name in limited {
            let limit = quantity(&limits[&name]);
            let request = quantity(&requests[&name]);
            match limit {
                None => {
                    let evidence = format!("{name}: {} is no whole number", limits[&name]);
                    self.add(id::K8S_POD_REQUEST, Severity::Error, subject, evidence, "give the number of HCAs");
                }
                Some(0) => {}
                Some(count) => {
                    if request.is_some_and(|r| r != count) {
                        let evidence = format!("{name} differs between requests and limits: the API server refuses it");
                        let remedy = "leave it out of requests";
                        self.add(id::K8S_POD_REQUEST, Severity::Error, subject, evidence, remedy);
                    }
                    found.push((name, count));
                }
            }
        }
        found
    }

    /// Compares a request with the configuration and the nodes; gives the possible HCAs on each node.
    fn check_request(&mut self, subject: &str, resource: &str, count: u64) -> Vec<NodeRequest<'a>> {
        let context = self.context;
        let Some(config) = context.config.resources.iter().find(|r| r.resource() == resource) else {
            let known: Vec<String> = context.config.resources.iter().map(ResourceConfig::resource).collect();
            let near = nearest_word(resource, known.iter().map(String::as_str));
            let remedy = match near {
                Some(near) => format!("did you mean {near}? The configuration has {}", known.join(", ")),
                None => self.known_resources(),
            };
            let evidence = format!("no entry of the configuration makes {resource}: the pod stays Pending");
            self.add(id::K8S_POD_REQUEST, Severity::Error, subject, evidence, remedy);
            return Vec::new();
        };
        if count > u64::from(config.slots) {
            let evidence =
                format!("it requests {count} {resource}, and a node has {} slots: it stays Pending", config.slots);
            self.add(id::K8S_POD_REQUEST, Severity::Error, subject, evidence, "request fewer, or raise rdmaHcaMax");
        }
        let mut requests = Vec::new();
        for node in &context.nodes {
            let hcas = select_hcas(node, &config.selectors);
            let usable: Vec<&Hca> = hcas.iter().copied().filter(|h| h.obstacle().is_none()).collect();
            if usable.is_empty() {
                let why = match hcas.first().and_then(|h| Some((h, h.obstacle()?))) {
                    Some((hca, why)) => format!("{} there is unhealthy: {why}", hca.name),
                    None => "no HCA there matches".to_owned(),
                };
                let evidence = format!("{} has no {resource}: {why}", node.label());
                self.add(id::K8S_NO_MATCH, Severity::Info, subject, evidence, "the pod is not placed there");
                continue;
            }
            let names: Vec<String> = usable.iter().map(|h| h.describe()).collect();
            if count > usable.len() as u64 {
                let evidence = format!(
                    "it requests {count} {resource}, and {} has {} HCAs: it gets slots of the same HCA twice, which adds \
                     nothing",
                    node.label(),
                    usable.len()
                );
                let remedy = format!("request {}", usable.len());
                self.add(id::K8S_POD_REQUEST, Severity::Warning, subject, evidence, remedy);
            }
            let evidence =
                format!("on {} it gets {} of {}", node.label(), count.min(usable.len() as u64), names.join(", "));
            self.add(id::K8S_MATCH, Severity::Info, subject, evidence, "none needed");
            requests.push(NodeRequest { subject: subject.to_owned(), resource: config, count, node, hcas: usable });
        }
        if requests.is_empty() {
            let evidence = format!("no node has a usable {resource}: the pod stays Pending");
            self.add(
                id::K8S_POD_REQUEST,
                Severity::Error,
                subject,
                evidence,
                "`spurline k8s lint` says why on each node",
            );
        }
        requests
    }

    fn check_memlock(&mut self, container: &Value, subject: &str) {
        let own = &container["securityContext"];
        let shared = &self.pod.spec["securityContext"];
        let user = own_or_shared(own, shared, "runAsUser").as_u64();
        let is_other =
            user.is_some_and(|u| u != 0) || (user.is_none() && *own_or_shared(own, shared, "runAsNonRoot") == true);
        let added: Vec<&str> =
            own["capabilities"]["add"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let may_lock = is_privileged(container) || added.iter().any(|c| matches!(*c, "IPC_LOCK" | "ALL"));
        let limits = format!("raise the limit for any user: {MEMLOCK_REMEDY}");
        if added.contains(&"CAP_IPC_LOCK") {
            let evidence = "capabilities.add has CAP_IPC_LOCK, and names have no CAP_ there".to_owned();
            self.add(id::K8S_POD_MEMLOCK, Severity::Error, subject, evidence, "write IPC_LOCK");
        } else if is_other {
            let evidence =
                "it runs as another user than root: an added capability does not reach it, so the runtime's \
                            limit of locked memory holds"
                    .to_owned();
            self.add(id::K8S_POD_MEMLOCK, Severity::Warning, subject, evidence, limits);
        } else if !may_lock {
            let evidence =
                "it has no capability IPC_LOCK, so the runtime's limit of locked memory holds, often 64 KiB or 8 MiB"
                    .to_owned();
            let remedy = format!("as root: securityContext: {{capabilities: {{add: [IPC_LOCK]}}}}; or {limits}");
            self.add(id::K8S_POD_MEMLOCK, Severity::Warning, subject, evidence, remedy);
        }
    }

    fn check_network(&mut self, requests: &[NodeRequest<'a>], functions: &[FunctionRequest]) {
        let label = self.pod.label.clone();
        let links: BTreeSet<HcaLink> = requests.iter().flat_map(|r| &r.hcas).map(|hca| hca.link).collect();
        if self.pod.spec["hostNetwork"] == true || (links.is_empty() && functions.is_empty()) {
            return;
        }
        let networks = network_names(&self.pod.annotations[NETWORKS_ANNOTATION]);
        let needs_address = requests.iter().flat_map(|r| &r.hcas).any(|hca| hca.needs_interface());
        if networks.is_empty() {
            if needs_address {
                let evidence =
                    "its HCAs are on Ethernet, and its network namespace gets no interface on them: all GIDs \
                                are zero there"
                        .to_owned();
                let remedy = "annotate k8s.v1.cni.cncf.io/networks with a macvlan or ipvlan on the HCA's interface \
                              (`spurline k8s advise` prints it), or set hostNetwork: true";
                self.add(id::K8S_POD_NETWORK, Severity::Error, &label, evidence, remedy);
            } else if links.iter().any(|link| link.has_lids()) {
                let evidence = "it has no interface on the InfiniBand network: verbs with LIDs work, rdma_cm and IP \
                                addresses of that network do not"
                    .to_owned();
                let remedy = "none for programs that exchange LIDs (MPI, NCCL, perftest); else an IPoIB attachment \
                              (`spurline k8s advise`) or hostNetwork: true";
                self.add(id::K8S_POD_NETWORK, Severity::Info, &label, evidence, remedy);
            }
        }
        self.check_function_networks(functions, &networks);
        let mut masters = Vec::new();
        for name in &networks {
            let Some(attachment) = self.manifest.attachments.get(name) else {
                let evidence = format!("the attachment {name} is not in this file and was not checked");
                let remedy = "append it to the file: kubectl get network-attachment-definition NAME -o yaml, or the IPoIBNetwork, \
                              MacvlanNetwork or HostDeviceNetwork that makes it";
                self.add(id::K8S_POD_NETWORK, Severity::Info, &label, evidence, remedy);
                masters.push(None);
                continue;
            };
            let NetworkAttachment { config, resource, .. } = attachment.clone();
            if let Some(resource) = resource {
                self.check_attached_resource(&label, name, without_prefix(&resource));
                masters.push(None);
                continue;
            }
            masters.push(self.check_attachment(&label, name, &config));
        }
        // The target of an unknown or wrong attachment can't be determined.
        if networks.is_empty() {
            return;
        }
        if let Some(masters) = masters.into_iter().collect::<Option<Vec<String>>>() {
            self.check_interfaces(requests, &masters);
        }
    }

    /// Compares the interfaces of the pod's attachments with the possible HCAs.
    fn check_interfaces(&mut self, requests: &[NodeRequest<'a>], masters: &[String]) {
        let is_attached = |hca: &Hca| hca.interfaces.iter().any(|interface| masters.contains(interface));
        for request in requests {
            let (attached, bare): (Vec<&Hca>, Vec<&Hca>) = request.hcas.iter().partition(|hca| is_attached(hca));
            let node = request.node.label();
            let resource = request.resource.resource();
            if bare.is_empty() {
                continue;
            }
            if !bare.iter().any(|hca| hca.needs_interface()) {
                let evidence = format!(
                    "on {node} it may get {}, and has no interface on it: verbs with LIDs work there, rdma_cm and IP \
                     addresses do not",
                    hca_names(&bare)
                );
                let remedy = "none for programs that exchange LIDs (MPI, NCCL, perftest); else attach those, too";
                self.add(id::K8S_POD_NETWORK, Severity::Info, &request.subject, evidence, remedy);
                continue;
            }
            let masters_of = |hcas: &[&Hca]| hcas.iter().flat_map(|hca| hca.masters()).collect::<Vec<_>>().join(", ");
            if attached.is_empty() {
                let severity = if requests.iter().any(|other| {
                    other.subject == request.subject
                        && other.resource == request.resource
                        && other.hcas.iter().any(|hca| is_attached(hca))
                }) {
                    Severity::Warning
                } else {
                    Severity::Error
                };
                let evidence = format!(
                    "its attachments are on {}, and none of the HCAs that {resource} gives on {node} is there ({}): all \
                     GIDs are zero in the pod",
                    masters.join(", "),
                    hca_names(&bare)
                );
                let remedy = format!("attach a macvlan or ipvlan on {}", masters_of(&bare));
                self.add(id::K8S_POD_NETWORK, severity, &request.subject, evidence, remedy);
                continue;
            }
            let all = request.hcas.len();
            let (evidence, remedy) = if request.count < all as u64 {
                let evidence = format!(
                    "on {node} it gets {} of {all} HCAs of {resource} and has an interface on {} only: with {} all GIDs \
                     are zero in the pod",
                    request.count,
                    hca_names(&attached),
                    hca_names(&bare)
                );
                let mut remedy = format!("request {resource}: {all} and attach {}, too", masters_of(&bare));
                let split = entries_per_hca(&self.context.config, request.resource, &request.hcas);
                if !split.is_empty() {
                    remedy.push_str(&format!("{split}, and request those that the attachments are on"));
                }
                (evidence, remedy)
            } else {
                let evidence = format!(
                    "on {node} it gets all HCAs of {resource} and has no interface on {}: all GIDs of it are zero in the \
                     pod",
                    hca_names(&bare)
                );
                (evidence, format!("attach {}, too, or use the others only", masters_of(&bare)))
            };
            self.add(id::K8S_POD_NETWORK, Severity::Warning, &request.subject, evidence, remedy);
        }
    }

    /// An attachment of a resource's devices: the pod has to request the resource, whose device decides on the interface.
    fn check_attached_resource(&mut self, label: &str, name: &str, resource: &str) {
        let mut containers = self.pod.spec["containers"].as_array().into_iter().flatten();
        if containers.any(|container| requests_any(container, |request| request.rsplit('/').next() == Some(resource))) {
            return;
        }
        let evidence =
            format!("attachment {name} takes its interface from the resource {resource}, and no container requests it");
        let remedy = format!(
            "request it: resources: {{limits: {{PREFIX/{resource}: 1}}}}, with the prefix that the node advertises; the network \
             resources injector adds it where it runs"
        );
        self.add(id::K8S_POD_NETWORK, Severity::Warning, label, evidence, remedy);
    }

    /// Examines an attachment; gives the interface, where known and right.
    fn check_attachment(&mut self, label: &str, name: &str, config: &Value) -> Option<String> {
        // In a list of plugins, the first is in charge of the interface.
        let first = if config["plugins"].is_array() { &config["plugins"][0] } else { config };
        let kind = first["type"].as_str().unwrap_or_default();
        let master = first["master"].as_str().unwrap_or_default();
        let hcas: Vec<&Hca> = self.context.nodes.iter().flat_map(|n| &n.hcas).collect();
        let on_master = hcas.iter().find(|h| h.interfaces.iter().any(|i| i == master));
        let link = on_master.map(|h| h.link);
        match (kind, link) {
            ("macvlan" | "ipvlan", Some(link)) if link.has_lids() => {
                let link = link.as_str();
                let evidence =
                    format!("attachment {name} is a {kind} on {master}, which is {link}: the kernel refuses it");
                let remedy = format!("use the IPoIB CNI: \"type\": \"ipoib\", \"master\": \"{master}\"");
                self.add(id::K8S_POD_NETWORK, Severity::Error, label, evidence, remedy);
            }
            ("ipoib" | "ib-sriov", Some(HcaLink::Roce | HcaLink::Iwarp)) => {
                let evidence = format!("attachment {name} is for InfiniBand, and {master} is Ethernet");
                self.add(id::K8S_POD_NETWORK, Severity::Error, label, evidence, "use macvlan or ipvlan");
            }
            ("macvlan" | "ipvlan" | "ipoib", None) if !master.is_empty() => {
                let evidence = format!("the master {master} of attachment {name} has no RDMA device on these nodes");
                let known: Vec<&str> = hcas.iter().filter_map(|h| h.interfaces.first().map(String::as_str)).collect();
                let remedy = format!("name one that has: {}", known.join(", "));
                self.add(id::K8S_POD_NETWORK, Severity::Error, label, evidence, remedy);
            }
            ("bridge" | "ptp" | "veth", _) => {
                let evidence = format!("attachment {name} is a {kind}: its interface is not on an RDMA device");
                self.add(id::K8S_POD_NETWORK, Severity::Error, label, evidence, "use macvlan, ipvlan or ipoib");
            }
            ("macvlan" | "ipvlan" | "ipoib" | "vlan", Some(_)) => return Some(master.to_owned()),
            ("host-device", _) => return first["device"].as_str().map(str::to_owned),
            _ => {}
        }
        None
    }

    fn check_devices(&mut self, containers: &[&Value]) {
        let label = self.pod.label.clone();
        for container in containers.iter().filter(|container| is_privileged(container)) {
            let name = container["name"].as_str().unwrap_or("unnamed");
            let evidence = format!("container {name} is privileged: it can open every RDMA device of the node");
            let remedy = "remove privileged; IPC_LOCK and the requested device nodes are enough";
            self.add(id::K8S_POD_DEVICES, Severity::Warning, &label, evidence, remedy);
        }
        let volumes = self.pod.spec["volumes"].as_array().cloned().unwrap_or_default();
        for path in volumes.iter().filter_map(|v| v["hostPath"]["path"].as_str()) {
            let path = path.trim_end_matches('/');
            if path == "/dev" || path.starts_with("/dev/infiniband") {
                let evidence = format!(
                    "a hostPath mounts {path}: nodes that the plugin did not give can be seen and not opened (EPERM)"
                );
                let remedy = "remove the volume; the requested device nodes are made by the runtime";
                self.add(id::K8S_POD_DEVICES, Severity::Warning, &label, evidence, remedy);
            }
        }
    }
}

fn hca_names(hcas: &[&Hca]) -> String {
    hcas.iter().map(|hca| hca.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn is_privileged(container: &Value) -> bool {
    container["securityContext"]["privileged"] == true
}

/// A whole number, also as a text.
fn quantity(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

/// The names in Multus' annotation: `a,ns/b@if`, or a JSON list of objects.
fn network_names(annotation: &Value) -> Vec<String> {
    let Some(text) = annotation.as_str() else { return Vec::new() };
    if let Ok(Value::Array(list)) = serde_json::from_str(text) {
        return list.iter().filter_map(|n| n["name"].as_str().map(str::to_owned)).collect();
    }
    text.split(',')
        .map(|part| {
            let name = part.trim().rsplit('/').next().unwrap_or_default();
            name.split('@').next().unwrap_or_default().to_owned()
        })
        .filter(|n| !n.is_empty())
        .collect()
}

/// A setting of a container, or else that of the pod.
fn own_or_shared<'a>(own: &'a Value, shared: &'a Value, key: &str) -> &'a Value {
    if own[key].is_null() { &shared[key] } else { &own[key] }
}
