//! Answers kubelet's calls for a resource. Holds no state: reads the resource's advertised state, and counts.

use crate::advertised::AdvertisedResource;
use crate::cdi;
use crate::metrics::ResourceCounters;
use crate::pb;
use crate::pb::device_plugin_server::DevicePlugin;
use futures::Stream;
use futures::stream::unfold;
use spurline_kube_devices::spread_slots;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

/// A resource, for the server.
#[derive(Clone)]
pub struct ResourceService {
    /// The name that pods request.
    pub resource: Arc<str>,
    pub state: watch::Receiver<Arc<AdvertisedResource>>,
    /// Becomes true when the server ends.
    pub stop: watch::Receiver<bool>,
    /// Whether pods get CDI names instead of device nodes.
    pub use_cdi: bool,
    pub counters: Arc<ResourceCounters>,
}

type ListStream = Pin<Box<dyn Stream<Item = Result<pb::ListAndWatchResponse, Status>> + Send>>;

/// Counts an open stream of kubelet.
struct OpenStream(Arc<ResourceCounters>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

#[tonic::async_trait]
impl DevicePlugin for ResourceService {
    type ListAndWatchStream = ListStream;

    async fn get_device_plugin_options(
        &self,
        _: Request<pb::Empty>,
    ) -> Result<Response<pb::DevicePluginOptions>, Status> {
        Ok(Response::new(plugin_options()))
    }

    async fn list_and_watch(&self, _: Request<pb::Empty>) -> Result<Response<ListStream>, Status> {
        self.counters.streams.fetch_add(1, Ordering::AcqRel);
        let open = OpenStream(Arc::clone(&self.counters));
        let start = (self.state.clone(), self.stop.clone(), open, true);
        let stream = unfold(start, |(mut state, mut stop, open, is_first)| async move {
            if !is_first {
                tokio::select! {
                    changed = state.changed() => changed.ok()?,
                    _ = stop.wait_for(|stopped| *stopped) => return None,
                }
            }
            let message = state.borrow_and_update().list_message();
            Some((Ok(message), (state, stop, open, false)))
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<pb::PreferredAllocationRequest>,
    ) -> Result<Response<pb::PreferredAllocationResponse>, Status> {
        let container_responses = request
            .get_ref()
            .container_requests
            .iter()
            .map(|wanted| {
                let size = usize::try_from(wanted.allocation_size).unwrap_or(0);
                let ids = spread_slots(&wanted.available_device_i_ds, &wanted.must_include_device_i_ds, size);
                pb::ContainerPreferredAllocationResponse { device_i_ds: ids }
            })
            .collect();
        Ok(Response::new(pb::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(&self, request: Request<pb::AllocateRequest>) -> Result<Response<pb::AllocateResponse>, Status> {
        let state = Arc::clone(&self.state.borrow());
        let mut container_responses = Vec::new();
        for container in &request.get_ref().container_requests {
            match self.answer_container(&state, &container.devices_ids) {
                Ok(answer) => container_responses.push(answer),
                Err(why) => {
                    self.counters.failures.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!("{}: an allocation failed: {why}", self.resource);
                    return Err(Status::failed_precondition(format!("{}: {why}", self.resource)));
                }
            }
        }
        Ok(Response::new(pb::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<pb::PreStartContainerRequest>,
    ) -> Result<Response<pb::PreStartContainerResponse>, Status> {
        Ok(Response::new(pb::PreStartContainerResponse {}))
    }
}

impl ResourceService {
    fn answer_container(
        &self,
        state: &AdvertisedResource,
        slots: &[String],
    ) -> Result<pb::ContainerAllocateResponse, String> {
        let hcas = state.hcas_of(slots)?;
        let names: Vec<&str> = hcas.iter().map(|h| h.name.as_str()).collect();
        let mut answer = pb::ContainerAllocateResponse {
            envs: [(variable_of(&self.resource), names.join(","))].into(),
            ..Default::default()
        };
        if self.use_cdi {
            answer.cdi_devices = names
                .iter()
                .map(|hca| pb::CdiDevice { name: format!("{}={hca}", cdi::kind_of(&self.resource)) })
                .collect();
        } else {
            let paths: BTreeMap<String, ()> =
                hcas.iter().flat_map(|hca| state.device_paths(hca)).map(|path| (path, ())).collect();
            answer.devices = paths
                .into_keys()
                .map(|path| pb::DeviceSpec {
                    container_path: path.clone(),
                    host_path: path,
                    permissions: "rw".to_owned(),
                })
                .collect();
        }
        for name in &names {
            self.counters.count_allocation(name);
        }
        tracing::info!("{}: a container gets {}", self.resource, names.join(", "));
        Ok(answer)
    }
}

/// The options of every resource.
pub fn plugin_options() -> pb::DevicePluginOptions {
    pb::DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// The environment variable that lists a container's HCAs: `SPURLINE_HCAS_RDMA_IB` for `rdma/ib`. No flag's variable has this
/// prefix.
fn variable_of(resource: &str) -> String {
    let (prefix, name) = resource.split_once('/').unwrap_or(("rdma", resource));
    format!("SPURLINE_HCAS_{}_{}", variable_word(prefix), variable_word(name))
}

fn variable_word(text: &str) -> String {
    text.to_ascii_uppercase().replace(['.', '-'], "_")
}
