//! The CSI node service: requests of the kubelet, checked and turned into calls of the volume table. Holds no state.

use crate::launcher::PodReference;
use crate::mounts::is_plain;
use crate::pb;
use crate::record::PublishedTarget;
use crate::settings::VolumeSettings;
use crate::volumes::{VolumeDemand, VolumeTable, status};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use tonic::{Request, Response, Status};

pub(crate) struct NodeService {
    /// The node's name.
    pub node_id: String,
    /// Inline volumes may have what a PersistentVolume may have.
    pub trust_inline: bool,
    pub volumes: Arc<VolumeTable>,
}

/// Runs a call to the end, also when the caller abandons the call: a mount must not be left half made.
async fn finish<T: Send + 'static>(
    call: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    tokio::spawn(call).await.map_err(|e| Status::internal(format!("the call failed: {e}")))?
}

/// Requires a field that is text.
pub(crate) fn required(name: &str, value: &str) -> Result<(), Status> {
    if value.is_empty() { Err(Status::invalid_argument(format!("{name} is missing"))) } else { Ok(()) }
}

/// Requires a directory.
fn directory(name: &str, value: &str) -> Result<PathBuf, Status> {
    required(name, value)?;
    let path = PathBuf::from(value);
    if !is_plain(&path) {
        return Err(Status::invalid_argument(format!("{name} '{value}' is not an absolute path")));
    }
    Ok(path)
}

/// The mount options of a capability.
///
/// # Errors
/// When there is no capability, or another than a file system.
pub(crate) fn mount_flags(capability: Option<&pb::VolumeCapability>) -> Result<Vec<String>, Status> {
    use pb::volume_capability::AccessType;
    let capability = capability.ok_or_else(|| Status::invalid_argument("volume_capability is missing"))?;
    match &capability.access_type {
        Some(AccessType::Mount(mount)) => Ok(mount.mount_flags.clone()),
        Some(AccessType::Block(_)) => Err(Status::invalid_argument(
            "a Spurline volume is a file system: leave volumeMode: Block out of the PersistentVolumeClaim",
        )),
        None => Err(Status::invalid_argument("volume_capability has no access type")),
    }
}

/// Refuses the option `rw` for a claim that only reads.
///
/// # Errors
/// When both are given.
pub(crate) fn check_access(settings: &VolumeSettings, capability: Option<&pb::VolumeCapability>) -> Result<(), Status> {
    use pb::volume_capability::access_mode::Mode;
    let mode = capability.and_then(|one| one.access_mode.as_ref()).map(|one| one.mode());
    match mode {
        Some(Mode::MultiNodeReaderOnly | Mode::SingleNodeReaderOnly) if settings.is_writable() => {
            Err(Status::invalid_argument(
                "the volume has the mount option rw and the access mode ReadOnlyMany: write accessModes: \
                 [ReadWriteMany], or leave rw out",
            ))
        }
        _ => Ok(()),
    }
}

/// The volume that a request names.
fn demand(
    volume_id: String,
    context: &HashMap<String, String>,
    capability: Option<&pb::VolumeCapability>,
    secrets: HashMap<String, String>,
) -> Result<VolumeDemand, Status> {
    let settings = VolumeSettings::parse(context, &mount_flags(capability)?).map_err(status)?;
    check_access(&settings, capability)?;
    Ok(VolumeDemand { volume_id, settings, secrets })
}

/// The pod that the kubelet names, with `podInfoOnMount` in the CSIDriver object.
fn pod_of(context: &HashMap<String, String>) -> Option<PodReference> {
    Some(PodReference {
        name: pod_word(context, "name")?,
        namespace: pod_word(context, "namespace")?,
        uid: pod_word(context, "uid")?,
    })
}

fn pod_word(context: &HashMap<String, String>, key: &str) -> Option<String> {
    context.get(&format!("csi.storage.k8s.io/pod.{key}")).cloned()
}

#[tonic::async_trait]
impl pb::node_server::Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<pb::NodeStageVolumeRequest>,
    ) -> Result<Response<pb::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        required("volume_id", &request.volume_id)?;
        let staging = directory("staging_target_path", &request.staging_target_path)?;
        let capability = request.volume_capability.as_ref();
        let demand = demand(request.volume_id, &request.volume_context, capability, request.secrets)?;
        let volumes = Arc::clone(&self.volumes);
        finish(async move { volumes.stage(demand, staging).await }).await?;
        Ok(Response::new(pb::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<pb::NodeUnstageVolumeRequest>,
    ) -> Result<Response<pb::NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        required("volume_id", &request.volume_id)?;
        directory("staging_target_path", &request.staging_target_path)?;
        let volumes = Arc::clone(&self.volumes);
        finish(async move { volumes.unstage(&request.volume_id).await }).await?;
        Ok(Response::new(pb::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<pb::NodePublishVolumeRequest>,
    ) -> Result<Response<pb::NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        required("volume_id", &request.volume_id)?;
        let path = directory("target_path", &request.target_path)?;
        let capability = request.volume_capability.as_ref();
        let demand = demand(request.volume_id, &request.volume_context, capability, request.secrets)?;
        let ephemeral = request.volume_context.get("csi.storage.k8s.io/ephemeral").is_some_and(|word| word == "true");
        if ephemeral && !self.trust_inline {
            // First: a wrong option is named with the nearest known option.
            self.volumes
                .check(&demand.settings)
                .and_then(|()| demand.settings.check_inline(&demand.secrets))
                .map_err(status)?;
        }
        let target = PublishedTarget { path, pod: pod_of(&request.volume_context), read_only: request.readonly };
        let volumes = Arc::clone(&self.volumes);
        finish(async move { volumes.publish(demand, target, !ephemeral).await }).await?;
        Ok(Response::new(pb::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<pb::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<pb::NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        required("volume_id", &request.volume_id)?;
        let target = directory("target_path", &request.target_path)?;
        let volumes = Arc::clone(&self.volumes);
        finish(async move { volumes.unpublish(&request.volume_id, &target).await }).await?;
        Ok(Response::new(pb::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<pb::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<pb::NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        required("volume_id", &request.volume_id)?;
        required("volume_path", &request.volume_path)?;
        let path = PathBuf::from(&request.volume_path);
        let Some(health) = self.volumes.health(&request.volume_id, &path).await? else {
            let text = format!("volume {} is not mounted at {}", request.volume_id, request.volume_path);
            return Err(Status::not_found(text));
        };
        let usage = pb::VolumeUsage {
            available: signed_bytes(health.cache_bytes.saturating_sub(health.cached_bytes)),
            total: signed_bytes(health.cache_bytes),
            used: signed_bytes(health.cached_bytes),
            unit: pb::volume_usage::Unit::Bytes.into(),
        };
        Ok(Response::new(pb::NodeGetVolumeStatsResponse {
            usage: vec![usage],
            volume_condition: Some(pb::VolumeCondition { abnormal: health.abnormal, message: health.message }),
        }))
    }

    async fn node_expand_volume(
        &self,
        _: Request<pb::NodeExpandVolumeRequest>,
    ) -> Result<Response<pb::NodeExpandVolumeResponse>, Status> {
        Err(Status::unimplemented("a Spurline volume is as large as its source"))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<pb::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<pb::NodeGetCapabilitiesResponse>, Status> {
        use pb::node_service_capability::{Rpc, Type, rpc};
        let kinds = [rpc::Type::StageUnstageVolume, rpc::Type::GetVolumeStats, rpc::Type::VolumeCondition];
        Ok(Response::new(pb::NodeGetCapabilitiesResponse {
            capabilities: kinds
                .map(|kind| pb::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })) })
                .into(),
        }))
    }

    async fn node_get_info(
        &self,
        _: Request<pb::NodeGetInfoRequest>,
    ) -> Result<Response<pb::NodeGetInfoResponse>, Status> {
        Ok(Response::new(pb::NodeGetInfoResponse { node_id: self.node_id.clone(), ..Default::default() }))
    }
}

fn signed_bytes(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
