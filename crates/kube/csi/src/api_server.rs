//! Requests to the cluster's API server, with the service account of this pod. It knows paths and JSON, not what the
//! objects mean. A handful of requests does not need the `kube` crate, whose types of all objects double the build.

use reqwest::{Certificate, Client, Method};
use serde_json::Value;
use spurline_config::Fault;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Deadline of one request.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// Where Kubernetes puts the token, the authorities and the namespace of a pod.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// A client of the API server.
#[derive(Debug)]
pub(crate) struct ApiServer {
    client: Client,
    /// `https://HOST:PORT`.
    base: String,
    token_file: PathBuf,
    /// The namespace of this pod.
    pub namespace: String,
}

/// An answer: the status and the object.
#[derive(Debug)]
pub(crate) struct ApiAnswer {
    pub status: u16,
    pub object: Value,
}

impl ApiServer {
    /// The server of the cluster in which this process runs.
    ///
    /// # Errors
    /// When this is no pod, or its service account is not mounted.
    pub(crate) fn in_cluster(account: &Path) -> Result<Self, Fault> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (Some(host), Some(port)) = (variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT"))
        else {
            return Err(Fault::missing(
                "this process runs in no pod: KUBERNETES_SERVICE_HOST is not set",
                "run the driver as a pod ('spurline k8s render'), or give --launcher process",
            ));
        };
        let read = |name: &str| {
            let file = account.join(name);
            std::fs::read_to_string(&file).map_err(|e| {
                let what = format!("the service account's file {}: {e}", file.display());
                Fault::missing(what, "leave automountServiceAccountToken on for the driver's pod")
            })
        };
        let (namespace, authorities) = (read("namespace")?.trim().to_owned(), read("ca.crt")?);
        let setup = |e: reqwest::Error| Fault::missing(format!("the API server's client: {}", root_cause(&e)), "");
        let certificates = Certificate::from_pem_bundle(authorities.as_bytes()).map_err(setup)?;
        let client = Client::builder()
            .tls_certs_only(certificates)
            .no_proxy()
            .timeout(REQUEST_LIMIT)
            .user_agent(concat!("spurline/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(setup)?;
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Ok(ApiServer { client, base: format!("https://{host}:{port}"), token_file: account.join("token"), namespace })
    }

    /// Sends a request and returns the answer, whatever its status.
    ///
    /// # Errors
    /// When there is no answer.
    pub(crate) async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<ApiAnswer, Fault> {
        let url = format!("{}{path}", self.base);
        let failed = |why: &dyn std::fmt::Display| {
            Fault::failed(format!("the API server does not answer {method} {path}: {why}"), "")
        };
        // Read for each request: Kubernetes replaces it every hour.
        let token = std::fs::read_to_string(&self.token_file).map_err(|e| failed(&e))?;
        let mut request = self.client.request(method.clone(), url).bearer_auth(token.trim());
        if let Some(body) = body {
            request = request.header("Content-Type", "application/json").body(body.to_string());
        }
        let answer = request.send().await.map_err(|e| failed(&root_cause(&e)))?;
        let status = answer.status().as_u16();
        let bytes = answer.bytes().await.map_err(|e| failed(&root_cause(&e)))?;
        let object = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Ok(ApiAnswer { status, object })
    }

    /// The same for a request whose answer has to be a success or one of `also`.
    ///
    /// # Errors
    /// When there is no answer or it is a refusal, with the server's message.
    pub(crate) async fn expect(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        also: &[u16],
    ) -> Result<ApiAnswer, Fault> {
        let answer = self.send(method.clone(), path, body).await?;
        if (200..300).contains(&answer.status) || also.contains(&answer.status) {
            return Ok(answer);
        }
        let why = answer.object["message"].as_str().unwrap_or("no message");
        let what = format!("the API server refuses {method} {path} with status {}: {why}", answer.status);
        let remedy = match answer.status {
            401 | 403 => "apply the ServiceAccount, Role and RoleBinding of 'spurline k8s render'",
            _ => "",
        };
        Err(Fault::failed(what, remedy))
    }
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
