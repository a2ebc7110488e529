//! Claims of pods for devices (dynamic resource allocation): judged by the claim, the template and the class where the manifest
//! has them. Evaluates no expression of a selector: the text is searched for the driver and for RDMA.

use crate::hca::NodeHcas;
use serde_json::Value;
use spurline_fabric::finding::id;
use spurline_fabric::{HostFinding, Severity};
use std::collections::BTreeMap;

/// Drivers of network devices, which also have devices without RDMA. Such a driver moves the interface into the pod and gives
/// every container of the pod the device nodes.
const NETWORK_DRIVERS: [&str; 2] = ["dra.net", "sriovnetwork.k8snetworkplumbingwg.io"];
/// How to append what is not in the file.
const APPEND: &str = "append it to the file: kubectl get resourceclaimtemplates,resourceclaims,deviceclasses -o yaml";

/// Claims, templates and classes of a manifest, by name.
#[derive(Default)]
pub(crate) struct ClaimObjects {
    claims: BTreeMap<String, Value>,
    templates: BTreeMap<String, Value>,
    classes: BTreeMap<String, Value>,
}

/// A claim of a pod, judged.
pub(crate) struct PodClaim {
    pub(crate) name: String,
    requests: Result<Vec<ClaimRequest>, String>,
}

/// A request of a claim for devices of a class.
struct ClaimRequest {
    name: String,
    class: String,
    /// `None` for all devices of a node.
    count: Option<u64>,
    kind: DeviceKind,
}

/// What the selectors of a class and a request say about the devices.
enum DeviceKind {
    /// RDMA devices of a driver, where the driver is known.
    Rdma(Option<String>),
    /// Network devices of a driver, with or without RDMA.
    Network(String),
    /// Devices that are selected for not having RDMA.
    WithoutRdma,
    /// Devices that may be network devices or not, and why that is not known.
    Unknown(String),
}

impl ClaimObjects {
    /// Takes an object; gives false for an object of another kind.
    pub(crate) fn add(&mut self, kind: &str, name: &str, spec: &Value) -> bool {
        let objects = match kind {
            "ResourceClaim" => &mut self.claims,
            "ResourceClaimTemplate" => &mut self.templates,
            "DeviceClass" => &mut self.classes,
            _ => return false,
        };
        let own = if kind == "ResourceClaimTemplate" { &spec["spec"] } else { spec };
        objects.insert(name.to_owned(), own.clone());
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.templates.is_empty() && self.classes.is_empty()
    }

    pub(crate) fn of_pod(&self, spec: &Value) -> Vec<PodClaim> {
        let listed = spec["resourceClaims"].as_array().into_iter().flatten();
        listed
            .map(|claim| PodClaim {
                name: claim["name"].as_str().unwrap_or("unnamed").to_owned(),
                requests: self.requests_of(claim),
            })
            .collect()
    }

    /// The requests of a pod's claim, or why these are not known.
    fn requests_of(&self, claim: &Value) -> Result<Vec<ClaimRequest>, String> {
        let spec = match (claim["resourceClaimName"].as_str(), claim["resourceClaimTemplateName"].as_str()) {
            (Some(name), _) => {
                self.claims.get(name).ok_or_else(|| format!("the ResourceClaim {name} is not in this file"))
            }
            (None, Some(name)) => {
                self.templates.get(name).ok_or_else(|| format!("the ResourceClaimTemplate {name} is not in this file"))
            }
            (None, None) => Err("it names neither a ResourceClaim nor a ResourceClaimTemplate".to_owned()),
        }?;
        let mut requests = Vec::new();
        for request in spec["devices"]["requests"].as_array().into_iter().flatten() {
            let name = request["name"].as_str().unwrap_or("unnamed");
            // The first alternative that a node can meet is allocated: each has to be right.
            let alternatives = request["firstAvailable"].as_array();
            let exact = if request["exactly"].is_null() { request } else { &request["exactly"] };
            match alternatives {
                Some(alternatives) => {
                    requests.extend(alternatives.iter().map(|alternative| self.read_request(name, alternative)));
                }
                None => requests.push(self.read_request(name, exact)),
            }
        }
        if requests.is_empty() { Err("it requests no device".to_owned()) } else { Ok(requests) }
    }

    fn read_request(&self, name: &str, request: &Value) -> ClaimRequest {
        let class = request["deviceClassName"].as_str().unwrap_or_default();
        let all = request["allocationMode"] == "All";
        ClaimRequest {
            name: name.to_owned(),
            class: class.to_owned(),
            count: (!all).then(|| request["count"].as_u64().unwrap_or(1)),
            kind: self.kind_of(class, request),
        }
    }

    fn kind_of(&self, class: &str, request: &Value) -> DeviceKind {
        let known = self.classes.get(class);
        let mut expressions = expressions_of(request);
        expressions.extend(known.into_iter().flat_map(expressions_of));
        let mut drivers = NETWORK_DRIVERS.iter();
        let network = drivers.find(|driver| class == **driver || expressions.iter().any(|e| names_driver(e, driver)));
        let network = network.map(|driver| (*driver).to_owned());
        let about_rdma: Vec<&String> = expressions.iter().filter(|e| e.to_ascii_lowercase().contains("rdma")).collect();
        if about_rdma.iter().any(|e| excludes_rdma(e)) {
            return DeviceKind::WithoutRdma;
        }
        if !about_rdma.is_empty() || class.to_ascii_lowercase().contains("rdma") {
            return DeviceKind::Rdma(network);
        }
        match (network, known) {
            (Some(driver), _) => DeviceKind::Network(driver),
            (None, None) => DeviceKind::Unknown(format!("the DeviceClass {class} is not in this file")),
            (None, Some(_)) => DeviceKind::Unknown(format!("nothing says that devices of the class {class} have RDMA")),
        }
    }

    /// The class whose devices an extended resource of a pod stands for.
    pub(crate) fn class_of_resource(&self, resource: &str) -> Option<&str> {
        let mut classes = self.classes.iter();
        classes.find(|(_, spec)| spec["extendedResourceName"] == resource).map(|(name, _)| name.as_str())
    }
}

/// The texts of the selectors of a class or a request, without blanks.
fn expressions_of(value: &Value) -> Vec<String> {
    let selectors = value["selectors"].as_array().into_iter().flatten();
    let texts = selectors.filter_map(|selector| selector["cel"]["expression"].as_str());
    texts.map(|text| text.split_whitespace().collect::<String>()).collect()
}

fn names_driver(expression: &str, driver: &str) -> bool {
    ["'", "\""].iter().any(|quote| expression.contains(&format!("{quote}{driver}{quote}")))
}

/// Whether an expression is true for devices without RDMA only: `device.attributes["dra.net"].rdma == false`, or a negation.
fn excludes_rdma(expression: &str) -> bool {
    let text = expression.to_ascii_lowercase();
    text.contains("rdma==false") || text.contains("rdma!=true") || (text.starts_with('!') && text.ends_with("rdma"))
}

impl PodClaim {
    /// Whether the claim is for RDMA, or may be.
    pub(crate) fn may_be_rdma(&self) -> bool {
        match &self.requests {
            Err(_) => true,
            Ok(requests) => requests.iter().any(|request| !matches!(request.kind, DeviceKind::WithoutRdma)),
        }
    }

    /// Whether the claim is for network devices, of which pods use RDMA.
    pub(crate) fn is_network(&self) -> bool {
        let requests = self.requests.as_deref().unwrap_or_default();
        requests.iter().any(|request| matches!(request.kind, DeviceKind::Rdma(_) | DeviceKind::Network(_)))
    }

    /// Judges the claim for a pod; `is_on_host` says that the pod has the node's own network.
    pub(crate) fn judge(&self, label: &str, is_on_host: bool, nodes: &[NodeHcas]) -> Vec<HostFinding> {
        let subject = format!("{label} claim {}", self.name);
        let requests = match &self.requests {
            Ok(requests) => requests,
            Err(why) => {
                let evidence = format!("it was not judged: {why}");
                return vec![HostFinding::new(id::K8S_POD_REQUEST, Severity::Info, subject, evidence, APPEND)];
            }
        };
        let mut findings = Vec::new();
        for request in requests {
            findings.push(request.judge(&subject));
            findings.extend(request.compare_nodes(&subject, nodes));
            findings.extend(request.refuse_host_network(&subject).filter(|_| is_on_host));
        }
        findings
    }

    /// Whether a container refers to a request that this claim does not have.
    pub(crate) fn lacks_request(&self, wanted: &str) -> bool {
        let Ok(requests) = &self.requests else { return false };
        // `request/alternative` names one of firstAvailable.
        let wanted = wanted.split('/').next().unwrap_or_default();
        requests.iter().all(|request| request.name != wanted)
    }
}

impl ClaimRequest {
    /// `2 devices of the class dra.net`.
    fn devices(&self) -> String {
        match self.count {
            Some(1) => format!("a device of the class {}", self.class),
            Some(count) => format!("{count} devices of the class {}", self.class),
            None => format!("all devices of the class {} of its node", self.class),
        }
    }

    fn judge(&self, subject: &str) -> HostFinding {
        let devices = self.devices();
        match &self.kind {
            DeviceKind::Rdma(driver) => {
                let whose = driver.as_ref().map_or(String::new(), |driver| format!(" by the driver {driver}"));
                let evidence = format!("it gets {devices} with RDMA{whose}");
                let remedy = "none needed: the driver gives device nodes and interface to the pod";
                HostFinding::new(id::K8S_MATCH, Severity::Info, subject, evidence, remedy)
            }
            DeviceKind::Network(driver) => {
                let evidence =
                    format!("it gets {devices}, and no selector requires RDMA: it may get an interface without");
                let remedy = format!(
                    "add a selector to the request: {{cel: {{expression: \"device.attributes['{driver}'].rdma == true\"}}}}"
                );
                HostFinding::new(id::K8S_POD_REQUEST, Severity::Warning, subject, evidence, remedy)
            }
            DeviceKind::WithoutRdma => {
                let evidence = format!("it gets {devices}, selected for having no RDMA");
                HostFinding::new(id::K8S_POD_REQUEST, Severity::Info, subject, evidence, "right for another use")
            }
            DeviceKind::Unknown(why) => {
                let evidence = format!("it gets {devices}, which were not judged: {why}");
                HostFinding::new(id::K8S_POD_REQUEST, Severity::Info, subject, evidence, APPEND)
            }
        }
    }

    /// A warning where no node has as many HCAs. The driver has the list of a node's devices.
    fn compare_nodes(&self, subject: &str, nodes: &[NodeHcas]) -> Option<HostFinding> {
        let count = self.count.filter(|_| matches!(self.kind, DeviceKind::Rdma(_)))?;
        let usable = nodes.iter().map(|node| node.hcas.iter().filter(|hca| hca.obstacle().is_none()).count() as u64);
        let most = usable.max().filter(|most| *most < count)?;
        let evidence = format!("it claims {count} devices with RDMA, and the nodes here have at most {most} each");
        let remedy = "request fewer, or give the nodes where the pod may run: --from; kubectl get resourceslices lists their devices";
        Some(HostFinding::new(id::K8S_NO_MATCH, Severity::Warning, subject, evidence, remedy))
    }

    /// The error of a pod with the node's network: there is no namespace that an interface could be moved to.
    fn refuse_host_network(&self, subject: &str) -> Option<HostFinding> {
        let (DeviceKind::Rdma(Some(driver)) | DeviceKind::Network(driver)) = &self.kind else { return None };
        let evidence =
            format!("{driver} moves interfaces into the pod, and a pod with hostNetwork: true can't claim them");
        let remedy = "leave hostNetwork out, or leave the claim out: the pod has the node's interfaces";
        Some(HostFinding::new(id::K8S_POD_NETWORK, Severity::Error, subject, evidence, remedy))
    }
}
