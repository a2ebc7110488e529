//! Requests to the cluster's API server, with the service account of this pod. Knows paths and JSON, not the meaning of objects.
//! A handful of requests does not need the `kube` crate, whose types of all objects double the build.

use reqwest::{Certificate, Client, Method};
use serde_json::Value;
use spurline_config::Fault;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Deadline of a request.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// Deadline of a connection, handshake included.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Where Kubernetes puts the token, the authorities and the namespace of a pod.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

const NO_ANSWER_REMEDY: &str =
    "check that pods of this node reach it (NetworkPolicy, firewall), and 'kubectl get --raw /readyz'";

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
    /// When this is no pod, or the service account is not mounted.
    pub(crate) fn in_cluster(account: &Path) -> Result<Self, Fault> {
        let (Some(host), Some(port)) = (variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT"))
        else {
            return Err(Fault::missing(
                "this process runs in no pod: KUBERNETES_SERVICE_HOST is not set",
                "run the driver as a pod ('spurline k8s render'), or give --launcher process",
            ));
        };
        let namespace = read_account_file(account, "namespace")?.trim().to_owned();
        let authorities = read_account_file(account, "ca.crt")?;
        let certificates = Certificate::from_pem_bundle(authorities.as_bytes()).map_err(client_fault)?;
        let client = Client::builder()
            .tls_certs_only(certificates)
            .no_proxy()
            .timeout(REQUEST_LIMIT)
            .connect_timeout(CONNECT_LIMIT)
            .user_agent(concat!("spurline/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(client_fault)?;
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Ok(ApiServer { client, base: format!("https://{host}:{port}"), token_file: account.join("token"), namespace })
    }

    /// Sends a request and returns the answer, whatever the status.
    ///
    /// # Errors
    /// When there is no answer.
    pub(crate) async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<ApiAnswer, NoAnswer> {
        // Read for each request: Kubernetes replaces the token every hour.
        let token = std::fs::read_to_string(&self.token_file)
            .map_err(|e| NoAnswer { fault: account_fault(&self.token_file, &e), was_sent: false })?;
        let none = |e: reqwest::Error| {
            let why = match (e.is_timeout(), e.is_connect()) {
                (true, true) => format!("no connection within {} s", CONNECT_LIMIT.as_secs()),
                (true, false) => format!("no answer within {} s", REQUEST_LIMIT.as_secs()),
                (false, _) => root_cause(&e),
            };
            let what = format!("the API server {} does not answer {method} {path}: {why}", self.base);
            NoAnswer { fault: Fault::failed(what, NO_ANSWER_REMEDY), was_sent: !e.is_connect() }
        };
        let mut request = self.client.request(method.clone(), format!("{}{path}", self.base)).bearer_auth(token.trim());
        if let Some(body) = body {
            request = request.header("Content-Type", "application/json").body(body.to_string());
        }
        let answer = request.send().await.map_err(none)?;
        let status = answer.status().as_u16();
        let bytes = answer.bytes().await.map_err(none)?;
        let object = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Ok(ApiAnswer { status, object })
    }

    /// The same for a request whose answer has to be a success or an element of `also`.
    ///
    /// # Errors
    /// Without an answer, and after a refusal, with the server's message.
    pub(crate) async fn expect(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        also: &[u16],
    ) -> Result<ApiAnswer, Fault> {
        let answer = self.send(method.clone(), path, body).await?;
        answer.check(&method, path, also)?;
        Ok(answer)
    }
}

fn read_account_file(account: &Path, name: &str) -> Result<String, Fault> {
    let file = account.join(name);
    std::fs::read_to_string(&file).map_err(|e| account_fault(&file, &e))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn client_fault(e: reqwest::Error) -> Fault {
    Fault::missing(format!("the API server's client: {}", root_cause(&e)), "")
}

impl ApiAnswer {
    /// Accepts a success, or an element of `also`.
    ///
    /// # Errors
    /// After a refusal, with the server's message.
    pub(crate) fn check(&self, method: &Method, path: &str, also: &[u16]) -> Result<(), Fault> {
        if (200..300).contains(&self.status) || also.contains(&self.status) {
            return Ok(());
        }
        let why = self.object["message"].as_str().unwrap_or("no message");
        let what = format!("the API server refuses {method} {path} with status {}: {why}", self.status);
        let remedy = match self.status {
            401 | 403 => "apply the ServiceAccount, Role and RoleBinding of 'spurline k8s render'",
            _ => "",
        };
        Err(Fault::failed(what, remedy))
    }
}

/// A request without an answer.
#[derive(Debug)]
pub(crate) struct NoAnswer {
    pub fault: Fault,
    /// Whether the server may have got the request.
    pub was_sent: bool,
}

impl From<NoAnswer> for Fault {
    fn from(none: NoAnswer) -> Self {
        none.fault
    }
}

fn account_fault(file: &Path, error: &std::io::Error) -> Fault {
    let remedy = match error.kind() {
        std::io::ErrorKind::PermissionDenied => "run the driver as root, or let its user read the file",
        _ => "leave automountServiceAccountToken on for the driver's pod",
    };
    Fault::missing(format!("the service account's file {}: {error}", file.display()), remedy)
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
