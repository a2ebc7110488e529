//! Resources of the SR-IOV network device plugin: virtual or whole functions that a pod gets with an interface. Judged by the policy
//! or the plugin's own list, and by the attachments that take from the resource.

use crate::embedded::embedded_lists;
use crate::pod::{NetworkAttachment, PodExamination};
use serde_json::Value;
use spurline_fabric::Severity;
use spurline_fabric::finding::id;

/// What makes the functions of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FunctionPolicy {
    /// `SriovNetworkNodePolicy/name`.
    object: String,
    /// The resource without prefix.
    resource: String,
    is_rdma: bool,
    /// Whether functions have the driver for user space, and no interface.
    is_vfio: bool,
    is_infiniband: Option<bool>,
    /// Names of the physical functions' interfaces; empty where other selectors choose the functions.
    interfaces: Vec<String>,
    /// The number of functions of a node, where the policy has a number.
    count: Option<u64>,
}

impl FunctionPolicy {
    /// A policy of the SR-IOV network operator.
    pub(crate) fn of_operator(name: &str, spec: &Value) -> Option<Self> {
        let selector = &spec["nicSelector"];
        let names = texts_of(&selector["pfNames"]);
        let each = spec["numVfs"].as_u64();
        let ranges: Option<Vec<u64>> = names.iter().map(|name| functions_in(name, each)).collect();
        let link = spec["linkType"].as_str().map(str::to_ascii_uppercase);
        Some(FunctionPolicy {
            object: format!("SriovNetworkNodePolicy/{name}"),
            resource: spec["resourceName"].as_str()?.to_owned(),
            is_rdma: spec["isRdma"] == true,
            is_vfio: spec["deviceType"] == "vfio-pci",
            is_infiniband: link.map(|link| link == "IB"),
            interfaces: names.iter().map(|name| interface_of(name)).collect(),
            count: ranges.filter(|ranges| !ranges.is_empty()).map(|ranges| ranges.iter().sum()),
        })
    }

    /// Whether the policy makes a resource, named without prefix.
    pub(crate) fn makes(&self, resource: &str) -> bool {
        self.resource == resource
    }

    /// The entries of the device plugin's own list, in a ConfigMap or in a NicClusterPolicy.
    pub(crate) fn of_lists(document: &Value) -> Vec<Self> {
        let mut policies = Vec::new();
        for list in embedded_lists(document) {
            let Ok(text) = serde_json::from_str::<Value>(&list.text) else { continue };
            for entry in text["resourceList"].as_array().into_iter().flatten() {
                let Some(resource) = entry["resourceName"].as_str() else { continue };
                // Several selectors are alternatives.
                let selectors = match &entry["selectors"] {
                    Value::Array(all) => all.clone(),
                    single => vec![single.clone()],
                };
                policies.push(FunctionPolicy {
                    object: list.object.clone(),
                    resource: resource.to_owned(),
                    is_rdma: entry["isRdma"] == true || selectors.iter().any(|selector| selector["isRdma"] == true),
                    is_vfio: selectors
                        .iter()
                        .any(|selector| texts_of(&selector["drivers"]).contains(&"vfio-pci".into())),
                    is_infiniband: None,
                    interfaces: selectors
                        .iter()
                        .flat_map(|selector| texts_of(&selector["pfNames"]))
                        .map(|name| interface_of(&name))
                        .collect(),
                    count: None,
                });
            }
        }
        policies
    }
}

fn texts_of(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// `ens1f0` of `ens1f0#0-3`.
fn interface_of(name: &str) -> String {
    name.split('#').next().unwrap_or_default().to_owned()
}

/// The functions of an interface: all that a policy makes, or a range of them, as in `ens1f0#0-3`.
fn functions_in(name: &str, all: Option<u64>) -> Option<u64> {
    let Some((_, range)) = name.split_once('#') else { return all };
    let (first, last) = range.split_once('-')?;
    Some(last.parse::<u64>().ok()?.checked_sub(first.parse().ok()?)?.saturating_add(1))
}

/// A container's request for functions.
pub(crate) struct FunctionRequest {
    /// The container.
    subject: String,
    /// The resource with prefix.
    resource: String,
    count: u64,
    policies: Vec<FunctionPolicy>,
}

/// The resource without the prefix, which is a setting of the operator.
pub(crate) fn without_prefix(resource: &str) -> &str {
    resource.rsplit('/').next().unwrap_or(resource)
}

impl PodExamination<'_> {
    /// Judges a request for functions.
    pub(crate) fn check_function_request(&mut self, subject: &str, resource: &str, count: u64) -> FunctionRequest {
        let name = without_prefix(resource);
        let policies: Vec<FunctionPolicy> =
            self.manifest.policies.iter().filter(|policy| policy.makes(name)).cloned().collect();
        if policies.is_empty() {
            let evidence = format!("{resource} was not judged: what makes it is not in this file");
            let remedy = "append the SriovNetworkNodePolicy (it needs isRdma: true), or the list of the SR-IOV network device plugin";
            self.add(id::K8S_POD_REQUEST, Severity::Info, subject, evidence, remedy);
        }
        for policy in &policies {
            self.check_policy(subject, resource, count, policy);
        }
        let most: Option<u64> = policies.iter().map(|policy| policy.count).sum();
        if let Some(most) = most.filter(|most| !policies.is_empty() && *most < count) {
            let evidence = format!("it requests {count} {resource}, and a node has {most}: it stays Pending");
            self.add(id::K8S_POD_REQUEST, Severity::Error, subject, evidence, "request fewer, or raise numVfs");
        }
        FunctionRequest { subject: subject.to_owned(), resource: resource.to_owned(), count, policies }
    }

    fn check_policy(&mut self, subject: &str, resource: &str, count: u64, policy: &FunctionPolicy) {
        let object = &policy.object;
        if policy.is_vfio {
            let evidence =
                format!("{object} gives {resource} the driver vfio-pci: the pod gets no interface and no RDMA device");
            let remedy = "set deviceType: netdevice and isRdma: true in the policy";
            self.add(id::K8S_POD_REQUEST, Severity::Error, subject, evidence, remedy);
            return;
        }
        if !policy.is_rdma {
            let evidence =
                format!("{object} has no isRdma: true: the pod gets interfaces of {resource} and no RDMA device node");
            self.add(id::K8S_POD_REQUEST, Severity::Error, subject, evidence, "set isRdma: true");
            return;
        }
        let of = match policy.interfaces.as_slice() {
            [] => String::new(),
            interfaces => format!(" of {}", interfaces.join(", ")),
        };
        let functions = if count == 1 { "a function" } else { &format!("{count} functions") };
        let evidence = format!("it gets {functions}{of}, with RDMA, by {object}");
        self.add(id::K8S_MATCH, Severity::Info, subject, evidence, "none needed");
        let nodes = &self.context.nodes;
        let is_there = nodes.iter().any(|node| node.interfaces.iter().any(|name| policy.interfaces.contains(name)));
        if !policy.interfaces.is_empty() && !nodes.is_empty() && !is_there {
            let evidence = format!("none of the nodes here has {}", policy.interfaces.join(" or "));
            let remedy = "the pod is placed on others; give those with --from";
            self.add(id::K8S_NO_MATCH, Severity::Info, subject, evidence, remedy);
        }
    }

    /// Compares requests for functions with the attachments that take interfaces from the same resources.
    pub(crate) fn check_function_networks(&mut self, requests: &[FunctionRequest], networks: &[String]) {
        for request in requests {
            let name = without_prefix(&request.resource);
            let known: Vec<&NetworkAttachment> =
                networks.iter().filter_map(|network| self.manifest.attachments.get(network)).collect();
            let from_it =
                known.iter().filter(|attachment| attachment.resource.as_deref().map(without_prefix) == Some(name));
            let attached = from_it.count();
            if attached as u64 > request.count {
                let evidence = format!(
                    "{attached} attachments take an interface from {}, and it requests {}",
                    request.resource, request.count
                );
                let remedy = format!("request {attached}; the network resources injector does that where it runs");
                self.add(id::K8S_POD_NETWORK, Severity::Warning, &request.subject, evidence, remedy);
            }
            // An attachment elsewhere may be the one.
            if attached == 0 && known.len() == networks.len() {
                self.report_unattached(request, name);
            }
        }
        for network in networks {
            self.check_isolation(network);
        }
    }

    fn report_unattached(&mut self, request: &FunctionRequest, name: &str) {
        let is_infiniband =
            !request.policies.is_empty() && request.policies.iter().all(|p| p.is_infiniband == Some(true));
        let evidence = format!("no attachment takes the interface of {}: it stays on the node", request.resource);
        let (severity, evidence) = if is_infiniband {
            (Severity::Info, format!("{evidence}, so verbs with LIDs work, rdma_cm and IP addresses do not"))
        } else {
            (Severity::Error, format!("{evidence}, and all GIDs are zero in the pod"))
        };
        let remedy = format!(
            "annotate k8s.v1.cni.cncf.io/networks with a network of the resource {name}: a SriovNetwork, or an attachment with the \
             annotation k8s.v1.cni.cncf.io/resourceName"
        );
        self.add(id::K8S_POD_NETWORK, severity, &request.subject, evidence, remedy);
    }

    /// The RDMA CNI moves the RDMA device along with the interface: needed where devices are exclusive to a namespace, and refused
    /// elsewhere.
    fn check_isolation(&mut self, network: &str) {
        let Some(attachment) = self.manifest.attachments.get(network).filter(|a| a.resource.is_some()) else { return };
        let planned = self.manifest.is_exclusive;
        let nodes = self.context.nodes.iter().filter(|node| !node.hcas.is_empty());
        let found: Vec<Option<bool>> = nodes.map(|node| node.rdma_exclusive).collect();
        let is_exclusive =
            planned.or(found.first().copied().flatten().filter(|one| found.iter().all(|n| n == &Some(*one))));
        let label = self.pod.label.clone();
        match (is_exclusive, attachment.moves_device) {
            (Some(true), false) => {
                let evidence = format!(
                    "attachment {network} is not chained with the RDMA CNI: in exclusive mode the RDMA device stays on the node"
                );
                let remedy = "add {\"type\": \"rdma\"}: metaPlugins of a SriovNetwork, or the last of the plugins of an attachment";
                self.add(id::K8S_POD_NETWORK, Severity::Error, &label, evidence, remedy);
            }
            (Some(false), true) => {
                let evidence =
                    format!("attachment {network} is chained with the RDMA CNI, which refuses nodes in shared mode");
                let remedy =
                    "rdma system set netns exclusive on the nodes: a SriovNetworkPoolConfig with rdmaMode: exclusive";
                let severity = if planned.is_some() { Severity::Error } else { Severity::Warning };
                self.add(id::K8S_POD_NETWORK, severity, &label, evidence, remedy);
            }
            _ => {}
        }
    }
}
