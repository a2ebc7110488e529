//! Counters of the plugin, by resource and HCA, and the content of the admin page. The project's other counters have no labels;
//! these do, and so are declared here.

use crate::advertised::AdvertisedResource;
use parking_lot::Mutex;
use serde_json::{Value, json};
use spurline_observe::AdminTarget;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use tokio::sync::watch;

/// Counters of a resource.
#[derive(Debug, Default)]
pub struct ResourceCounters {
    /// Open streams of kubelet.
    pub streams: AtomicUsize,
    /// Allocations that failed.
    pub failures: AtomicU64,
    /// Registrations that kubelet accepted.
    pub registrations: AtomicU64,
    /// Whether the last registration holds.
    pub is_registered: AtomicBool,
    /// Containers by HCA.
    allocations: Mutex<BTreeMap<String, u64>>,
}

impl ResourceCounters {
    /// Counts a container that got an HCA.
    pub fn count_allocation(&self, hca: &str) {
        *self.allocations.lock().entry(hca.to_owned()).or_default() += 1;
    }
}

/// A resource for the page.
pub struct ObservedResource {
    /// The name.
    pub resource: String,
    pub state: watch::Receiver<Arc<AdvertisedResource>>,
    pub counters: Arc<ResourceCounters>,
}

/// The state of the whole plugin, for the metrics page.
#[derive(Default)]
pub struct PluginStatus {
    resources: Mutex<Vec<ObservedResource>>,
    /// Configurations that were applied.
    pub(crate) loads: AtomicU64,
    /// Why the present configuration file is not applied.
    pub(crate) config_error: Mutex<Option<String>>,
}

impl std::fmt::Debug for PluginStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginStatus").finish_non_exhaustive()
    }
}

impl PluginStatus {
    /// Replaces the resources.
    pub(crate) fn set_resources(&self, resources: Vec<ObservedResource>) {
        *self.resources.lock() = resources;
    }

    fn to_json(&self) -> Value {
        let resources: Vec<Value> = self.resources.lock().iter().map(|r| {
            let state = r.state.borrow();
            let (slots, healthy) = state.slot_counts();
            let hcas: Vec<Value> = state
                .hcas
                .iter()
                .map(|h| json!({"hca": h.name, "numa_node": h.numa_node, "unhealthy": h.obstacle, "device_nodes": h.device_nodes}))
                .collect();
            json!({
                "resource": r.resource,
                "slots": slots,
                "healthy_slots": healthy,
                "registered": r.counters.is_registered.load(Ordering::Acquire),
                "registrations": r.counters.registrations.load(Ordering::Relaxed),
                "streams": r.counters.streams.load(Ordering::Acquire),
                "allocations": *r.counters.allocations.lock(),
                "allocation_failures": r.counters.failures.load(Ordering::Relaxed),
                "hcas": hcas,
                "cdi_error": state.cdi_error,
            })
        }).collect();
        json!({
            "resources": resources,
            "config_loads": self.loads.load(Ordering::Relaxed),
            "config_error": *self.config_error.lock(),
        })
    }
}

/// Name, kind and meaning of each metric.
const PLUGIN_METRICS: [(&str, &str, &str); 10] = [
    ("spurline_k8s_slots", "gauge", "slots that the node advertises"),
    ("spurline_k8s_healthy_slots", "gauge", "slots of HCAs that pods can use"),
    ("spurline_k8s_hca_healthy", "gauge", "1 when pods can use the HCA"),
    ("spurline_k8s_allocations_total", "counter", "containers that got the HCA"),
    ("spurline_k8s_allocation_failures_total", "counter", "allocations that failed"),
    ("spurline_k8s_registrations_total", "counter", "registrations that kubelet accepted"),
    ("spurline_k8s_registered", "gauge", "1 when the resource is registered at kubelet"),
    ("spurline_k8s_cdi_valid", "gauge", "0 when the CDI file of the resource can't be written"),
    ("spurline_k8s_config_loads_total", "counter", "configurations that were applied"),
    ("spurline_k8s_config_valid", "gauge", "0 when the configuration file has an error and the former one is used"),
];

impl AdminTarget for PluginStatus {
    fn stats(&self) -> Value {
        self.to_json()
    }

    fn prometheus(&self) -> String {
        let mut lines: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        let mut add = |name: &'static str, labels: String, value: u64| {
            lines.entry(name).or_default().push(format!("{name}{labels} {value}"));
        };
        for r in self.resources.lock().iter() {
            let state = r.state.borrow();
            let (slots, healthy) = state.slot_counts();
            let of = |more: &str| format!("{{resource=\"{}\"{more}}}", r.resource);
            add("spurline_k8s_slots", of(""), slots as u64);
            add("spurline_k8s_healthy_slots", of(""), healthy as u64);
            for hca in &state.hcas {
                let labels = of(&format!(",hca=\"{}\"", hca.name));
                add("spurline_k8s_hca_healthy", labels, u64::from(hca.obstacle.is_none()));
            }
            for (hca, count) in r.counters.allocations.lock().iter() {
                add("spurline_k8s_allocations_total", of(&format!(",hca=\"{hca}\"")), *count);
            }
            let counters = &r.counters;
            add("spurline_k8s_allocation_failures_total", of(""), counters.failures.load(Ordering::Relaxed));
            add("spurline_k8s_registrations_total", of(""), counters.registrations.load(Ordering::Relaxed));
            add("spurline_k8s_registered", of(""), u64::from(counters.is_registered.load(Ordering::Acquire)));
            add("spurline_k8s_cdi_valid", of(""), u64::from(state.cdi_error.is_none()));
        }
        add("spurline_k8s_config_loads_total", String::new(), self.loads.load(Ordering::Relaxed));
        add("spurline_k8s_config_valid", String::new(), u64::from(self.config_error.lock().is_none()));
        let mut out = String::new();
        for (name, kind, meaning) in PLUGIN_METRICS {
            let _ = writeln!(out, "# HELP {name} {meaning}\n# TYPE {name} {kind}");
            for line in lines.get(name).into_iter().flatten() {
                let _ = writeln!(out, "{line}");
            }
        }
        out
    }

    fn info(&self, _: &[u8]) -> Result<Value> {
        Err(Error::new(ErrorKind::Unsupported, "a device plugin holds no files"))
    }

    fn status(&self) -> Value {
        let mut status = self.to_json();
        status["kind"] = "device-plugin".into();
        status["version"] = env!("CARGO_PKG_VERSION").into();
        status
    }

    fn health(&self) -> Result<()> {
        if let Some(why) = &*self.config_error.lock() {
            return Err(Error::new(ErrorKind::Invalid, why.clone()));
        }
        let resources = self.resources.lock();
        for resource in resources.iter() {
            if let Some(why) = &resource.state.borrow().cdi_error {
                return Err(Error::new(ErrorKind::Unavailable, format!("{}: {why}", resource.resource)));
            }
        }
        match resources.iter().find(|r| !r.counters.is_registered.load(Ordering::Acquire)) {
            Some(r) => Err(Error::new(ErrorKind::Unavailable, format!("{} is not registered at kubelet", r.resource))),
            None => Ok(()),
        }
    }
}
