//! The CSI controller service: makes volumes from the parameters of a StorageClass. A volume is only a name and attributes, so
//! nothing is stored. Does not know nodes.

use crate::node::{check_access, mount_flags, required};
use crate::pb;
use crate::settings::VolumeSettings;
use crate::volumes::{VolumeTable, status};
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The prefix of the ids of provisioned volumes.
const PROVISIONED_PREFIX: &str = "spurline-";

pub(crate) struct ControllerService {
    pub volumes: Arc<VolumeTable>,
}

/// An id for a name of any length.
fn id_of(name: &str) -> String {
    format!("{PROVISIONED_PREFIX}{:032x}", xxhash_rust::xxh3::xxh3_128(name.as_bytes()))
}

/// A call that has no meaning for volumes that are views of a source.
fn unsupported<T>(what: &str) -> Result<Response<T>, Status> {
    Err(Status::unimplemented(format!("{what}: a Spurline volume is a view of its source")))
}

#[tonic::async_trait]
impl pb::controller_server::Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<pb::CreateVolumeRequest>,
    ) -> Result<Response<pb::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        required("name", &request.name)?;
        if request.volume_capabilities.is_empty() {
            return Err(Status::invalid_argument("volume_capabilities is missing"));
        }
        if request.volume_content_source.is_some() {
            return Err(Status::invalid_argument(
                "a Spurline volume can't be a copy of a volume or snapshot: leave dataSource out of the claim",
            ));
        }
        for capability in &request.volume_capabilities {
            let flags = mount_flags(Some(capability))?;
            let settings = VolumeSettings::parse(&request.parameters, &flags).map_err(status)?;
            check_access(&settings, Some(capability))?;
            self.volumes.check(&settings).map_err(status)?;
        }
        let volume = pb::Volume {
            volume_id: id_of(&request.name),
            capacity_bytes: request.capacity_range.map_or(0, |range| range.required_bytes),
            volume_context: request.parameters,
            ..Default::default()
        };
        Ok(Response::new(pb::CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<pb::DeleteVolumeRequest>,
    ) -> Result<Response<pb::DeleteVolumeResponse>, Status> {
        required("volume_id", &request.into_inner().volume_id)?;
        Ok(Response::new(pb::DeleteVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<pb::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<pb::ValidateVolumeCapabilitiesResponse>, Status> {
        use pb::validate_volume_capabilities_response::Confirmed;
        let request = request.into_inner();
        required("volume_id", &request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(Status::invalid_argument("volume_capabilities is missing"));
        }
        if !request.volume_id.starts_with(PROVISIONED_PREFIX) {
            return Err(Status::not_found(format!("there is no provisioned volume {}", request.volume_id)));
        }
        let refused = request.volume_capabilities.iter().find_map(|one| mount_flags(Some(one)).err());
        let (confirmed, message) = match refused {
            Some(why) => (None, why.message().to_owned()),
            None => {
                let confirmed = Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                };
                (Some(confirmed), String::new())
            }
        };
        Ok(Response::new(pb::ValidateVolumeCapabilitiesResponse { confirmed, message }))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<pb::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<pb::ControllerGetCapabilitiesResponse>, Status> {
        use pb::controller_service_capability::{Rpc, Type, rpc};
        let kind = Rpc { r#type: rpc::Type::CreateDeleteVolume.into() };
        let capabilities = vec![pb::ControllerServiceCapability { r#type: Some(Type::Rpc(kind)) }];
        Ok(Response::new(pb::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_publish_volume(
        &self,
        _: Request<pb::ControllerPublishVolumeRequest>,
    ) -> Result<Response<pb::ControllerPublishVolumeResponse>, Status> {
        unsupported("ControllerPublishVolume")
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<pb::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<pb::ControllerUnpublishVolumeResponse>, Status> {
        unsupported("ControllerUnpublishVolume")
    }

    async fn list_volumes(
        &self,
        _: Request<pb::ListVolumesRequest>,
    ) -> Result<Response<pb::ListVolumesResponse>, Status> {
        unsupported("ListVolumes")
    }

    async fn get_capacity(
        &self,
        _: Request<pb::GetCapacityRequest>,
    ) -> Result<Response<pb::GetCapacityResponse>, Status> {
        unsupported("GetCapacity")
    }

    async fn create_snapshot(
        &self,
        _: Request<pb::CreateSnapshotRequest>,
    ) -> Result<Response<pb::CreateSnapshotResponse>, Status> {
        unsupported("CreateSnapshot")
    }

    async fn delete_snapshot(
        &self,
        _: Request<pb::DeleteSnapshotRequest>,
    ) -> Result<Response<pb::DeleteSnapshotResponse>, Status> {
        unsupported("DeleteSnapshot")
    }

    async fn list_snapshots(
        &self,
        _: Request<pb::ListSnapshotsRequest>,
    ) -> Result<Response<pb::ListSnapshotsResponse>, Status> {
        unsupported("ListSnapshots")
    }

    async fn get_snapshot(
        &self,
        _: Request<pb::GetSnapshotRequest>,
    ) -> Result<Response<pb::GetSnapshotResponse>, Status> {
        unsupported("GetSnapshot")
    }

    async fn controller_expand_volume(
        &self,
        _: Request<pb::ControllerExpandVolumeRequest>,
    ) -> Result<Response<pb::ControllerExpandVolumeResponse>, Status> {
        unsupported("ControllerExpandVolume")
    }

    async fn controller_get_volume(
        &self,
        _: Request<pb::ControllerGetVolumeRequest>,
    ) -> Result<Response<pb::ControllerGetVolumeResponse>, Status> {
        unsupported("ControllerGetVolume")
    }

    async fn controller_modify_volume(
        &self,
        _: Request<pb::ControllerModifyVolumeRequest>,
    ) -> Result<Response<pb::ControllerModifyVolumeResponse>, Status> {
        unsupported("ControllerModifyVolume")
    }
}
