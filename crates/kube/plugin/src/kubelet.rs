//! Registration at kubelet. A single call with a deadline; when to register is decided by the plugin.

use crate::pb;
use crate::pb::registration_client::RegistrationClient;
use crate::service::plugin_options;
use hyper_util::rt::TokioIo;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};
use tower::service_fn;

/// Name of kubelet's socket.
pub const SOCKET: &str = "kubelet.sock";
/// Deadline of a registration; kubelet answers at once and connects to the plugin afterwards.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Registers `resource` with the socket `endpoint` in `dir`.
///
/// # Errors
/// A sentence for the log, with the remedy.
pub async fn register_resource(dir: &Path, resource: &str, endpoint: &str) -> Result<(), String> {
    let socket = dir.join(SOCKET);
    let attempt = async {
        let stream = UnixStream::connect(&socket).await.map_err(|error| connect_reason(&socket, &error))?;
        let mut stream = Some(TokioIo::new(stream));
        // kubelet serves a single host; the name is not used.
        let connector = service_fn(move |_: Uri| {
            let stream = stream.take().ok_or_else(|| std::io::Error::other("used"));
            async move { stream }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
        let channel = channel.map_err(|error| format!("{}: {error}", socket.display()))?;
        let request = pb::RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_owned(),
            options: Some(plugin_options()),
        };
        let registered = RegistrationClient::new(channel).register(request).await;
        registered.map(drop).map_err(|status| format!("kubelet refuses: {}", status.message()))
    };
    match tokio::time::timeout(REGISTRATION_TIMEOUT, attempt).await {
        Ok(result) => result,
        Err(_) => Err(format!("{} does not answer within {} s", socket.display(), REGISTRATION_TIMEOUT.as_secs())),
    }
}

fn connect_reason(socket: &Path, error: &std::io::Error) -> String {
    let remedy = match error.kind() {
        std::io::ErrorKind::NotFound => {
            "kubelet does not run, or its directory is another one: --plugin-dir ROOT/device-plugins, with the ROOT of \
             kubelet's --root-dir"
        }
        std::io::ErrorKind::ConnectionRefused => "kubelet does not listen yet, or has ended",
        std::io::ErrorKind::PermissionDenied => "run the plugin as root (uid 0); it needs no capability",
        _ => "check that kubelet runs",
    };
    format!("{}: {error}; {remedy}", socket.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pb::registration_server::{Registration, RegistrationServer};
    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response, Status};

    /// A kubelet that takes no plugin.
    struct RefusingKubelet;

    #[tonic::async_trait]
    impl Registration for RefusingKubelet {
        async fn register(&self, request: Request<pb::RegisterRequest>) -> Result<Response<pb::Empty>, Status> {
            let version = request.into_inner().version;
            Err(Status::unknown(format!("the requested version {version} is not supported")))
        }
    }

    #[test]
    fn each_way_of_failing_is_named() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let register = || register_resource(dir.path(), "rdma/ib", "x.sock");
        let said = runtime.block_on(register()).unwrap_err();
        assert!(said.contains("kubelet does not run, or its directory is another one: --plugin-dir"), "{said}");
        // The socket of a kubelet that was killed.
        let socket = dir.path().join(SOCKET);
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let said = runtime.block_on(register()).unwrap_err();
        assert!(said.contains("kubelet does not listen yet, or has ended"), "{said}");
        std::fs::remove_file(&socket).unwrap();
        let said = runtime.block_on(async {
            let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
            let server = tonic::transport::Server::builder().add_service(RegistrationServer::new(RefusingKubelet));
            tokio::spawn(server.serve_with_incoming(incoming));
            register().await
        });
        assert_eq!(said, Err("kubelet refuses: the requested version v1beta1 is not supported".to_owned()));
    }
}
