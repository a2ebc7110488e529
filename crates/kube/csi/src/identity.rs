//! The CSI identity service. Knows nothing of volumes.

use crate::{DRIVER_NAME, pb};
use std::collections::HashMap;
use tonic::{Request, Response, Status};

/// The identity service.
#[derive(Debug, Default)]
pub(crate) struct IdentityService;

#[tonic::async_trait]
impl pb::identity_server::Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<pb::GetPluginInfoRequest>,
    ) -> Result<Response<pb::GetPluginInfoResponse>, Status> {
        Ok(Response::new(pb::GetPluginInfoResponse {
            name: DRIVER_NAME.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: HashMap::new(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<pb::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<pb::GetPluginCapabilitiesResponse>, Status> {
        use pb::plugin_capability::{Service, Type, service};
        let service = Service { r#type: service::Type::ControllerService.into() };
        let capabilities = vec![pb::PluginCapability { r#type: Some(Type::Service(service)) }];
        Ok(Response::new(pb::GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<pb::ProbeRequest>) -> Result<Response<pb::ProbeResponse>, Status> {
        Ok(Response::new(pb::ProbeResponse { ready: Some(true) }))
    }
}
