//! The advertised state of a resource: the HCAs with device nodes and health, and the slots. Rebuilt whenever the node or the
//! configuration changes, and compared with the last state.

use crate::pb;
use spurline_kube_devices::{NodeHcas, ResourceConfig, SlotTable, hca_of_slot, select_hcas};
use std::collections::BTreeSet;

/// The directory of RDMA device nodes, on the host and in pods.
const DEVICE_DIR: &str = "/dev/infiniband";

/// An HCA of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdvertisedHca {
    pub name: String,
    pub numa_node: Option<u32>,
    /// The device nodes, without directory.
    pub device_nodes: Vec<String>,
    /// Why the slots are unhealthy; `None` for healthy slots.
    pub obstacle: Option<String>,
}

/// The state of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdvertisedResource {
    pub hcas: Vec<AdvertisedHca>,
    /// The slots, by position of the HCA.
    pub table: SlotTable,
    /// Whether the device node of the connection manager exists.
    pub rdma_cm: bool,
    /// Why the CDI file can't be written, where pods get CDI names.
    pub cdi_error: Option<String>,
}

impl AdvertisedResource {
    /// The state of `resource` on `node`.
    pub fn of_node(resource: &ResourceConfig, node: &NodeHcas) -> Self {
        let exclusive = node.rdma_exclusive == Some(true);
        let hcas: Vec<AdvertisedHca> = select_hcas(node, &resource.selectors)
            .into_iter()
            .map(|hca| {
                let mut device_nodes: Vec<String> = hca.uverbs.iter().cloned().collect();
                if resource.extra.umad {
                    device_nodes.extend(hca.umad.iter().cloned());
                }
                if resource.extra.issm {
                    device_nodes.extend(hca.issm.iter().cloned());
                }
                let obstacle = if exclusive {
                    Some("RDMA devices are exclusive to a network namespace (rdma system set netns shared)".into())
                } else {
                    hca.obstacle()
                };
                AdvertisedHca { name: hca.name.clone(), numa_node: hca.numa_node, device_nodes, obstacle }
            })
            .collect();
        let names: Vec<&str> = hcas.iter().map(|h| h.name.as_str()).collect();
        let table = SlotTable::divide(&names, resource.slots);
        AdvertisedResource { table, rdma_cm: node.rdma_cm, hcas, cdi_error: None }
    }

    /// Makes all slots unhealthy because the CDI file that describes the HCAs is missing.
    pub fn refuse_cdi(&mut self, why: String) {
        for hca in &mut self.hcas {
            hca.obstacle.get_or_insert_with(|| why.clone());
        }
        self.cdi_error = Some(why);
    }

    /// Whether an HCA has a device node.
    pub fn has_device_nodes(&self) -> bool {
        self.hcas.iter().any(|hca| !hca.device_nodes.is_empty())
    }

    /// Number of slots, and of healthy slots.
    pub fn slot_counts(&self) -> (usize, usize) {
        let healthy = self.table.slots.iter().filter(|s| self.hcas[s.hca].obstacle.is_none()).count();
        (self.table.slots.len(), healthy)
    }

    /// The message that lists the slots.
    pub fn list_message(&self) -> pb::ListAndWatchResponse {
        pb::ListAndWatchResponse {
            devices: self
                .table
                .slots
                .iter()
                .map(|slot| {
                    let hca = &self.hcas[slot.hca];
                    let topology =
                        hca.numa_node.map(|n| pb::TopologyInfo { nodes: vec![pb::NumaNode { id: i64::from(n) }] });
                    let health = if hca.obstacle.is_none() { "Healthy" } else { "Unhealthy" };
                    pb::Device { id: slot.id.clone(), health: health.to_owned(), topology }
                })
                .collect(),
        }
    }

    /// The HCAs that the slots name, each once.
    ///
    /// # Errors
    /// When a slot names an HCA that pods cannot use, with the sentence for the pod's event.
    pub fn hcas_of<'a>(&'a self, slots: &[String]) -> Result<Vec<&'a AdvertisedHca>, String> {
        let mut names = BTreeSet::new();
        for id in slots {
            names.insert(hca_of_slot(id).ok_or_else(|| format!("'{id}' is no slot of this plugin"))?);
        }
        names
            .into_iter()
            .map(|name| {
                let hca = self.hcas.iter().find(|h| h.name == name);
                let hca =
                    hca.ok_or_else(|| format!("the HCA {name} is no longer on this node, or no longer configured"))?;
                if hca.device_nodes.is_empty() {
                    return Err(format!("the HCA {name} has no device node now: its driver was unloaded"));
                }
                Ok(hca)
            })
            .collect()
    }

    /// The paths of an HCA's device nodes, with the connection manager's.
    pub fn device_paths(&self, hca: &AdvertisedHca) -> Vec<String> {
        let cm = self.rdma_cm.then_some("rdma_cm");
        hca.device_nodes.iter().map(String::as_str).chain(cm).map(|node| format!("{DEVICE_DIR}/{node}")).collect()
    }
}
