//! A server of AWS credentials on loopback: STS, the SSO portal, container roles and the instance metadata service. Deliberately
//! checks only that each request has the parts that the real service needs, and returns a single key.

use crate::http1::HttpHead;
use crate::{ROLE_KEY, ROLE_SECRET};
use parking_lot::Mutex;
use std::io::{self, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The bearer token that the SSO portal accepts.
pub const SSO_TOKEN: &str = "spurline-test-sso-token";
const CREDENTIALS_EXPIRATION: &str = "2099-01-01T00:00:00Z";
const EXPIRATION_MS: u64 = 4_070_908_800_000;

/// A server of credentials that ends when dropped. All credentials are [`ROLE_KEY`] with [`ROLE_SECRET`].
pub struct AwsIdentityServer {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    closed: Arc<AtomicBool>,
}

impl AwsIdentityServer {
    /// Listens on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// When no port is free.
    pub fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let closed = Arc::<AtomicBool>::default();
        let log = Arc::clone(&requests);
        let ends = Arc::clone(&closed);
        std::thread::Builder::new().name("testkit-aws".into()).spawn(move || {
            for client in listener.incoming().flatten() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                // A client that disconnects is not an error of the server.
                let _ = serve_client(&client, &log);
            }
        })?;
        Ok(AwsIdentityServer { address, requests, closed })
    }

    /// The endpoint URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests so far: method, path and parameters, without the values of credentials.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }
}

impl Drop for AwsIdentityServer {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
        // Wakes the accepting thread, which then ends.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

fn serve_client(client: &TcpStream, log: &Mutex<Vec<String>>) -> io::Result<()> {
    client.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut from = BufReader::new(client);
    let Some(head) = HttpHead::read(&mut from)? else { return Ok(()) };
    let mut body = vec![0; head.length.unwrap_or(0) as usize];
    from.read_exact(&mut body)?;
    let raw = String::from_utf8_lossy(&head.raw).into_owned();
    let header = |name: &str| {
        let line = raw.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let method = head.word(0);
    let target = head.word(1);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let parameters = format!("{query}&{}", String::from_utf8_lossy(&body));
    let parameter = |name: &str| parameters.split('&').find_map(|p| p.strip_prefix(name)?.strip_prefix('='));
    let action = parameter("Action").unwrap_or_default();
    log.lock().push(format!("{method} {path} {action} {}", parameter("RoleArn").unwrap_or_default()));

    let answer = match (method, path) {
        ("GET" | "POST", "/") if action == "AssumeRole" => {
            header("authorization").map(|_| sts_answer(action)).ok_or((403, "unsigned"))
        }
        ("POST", "/") if action == "AssumeRoleWithWebIdentity" => {
            parameter("WebIdentityToken").map(|_| sts_answer(action)).ok_or((400, "no token"))
        }
        ("GET", "/federation/credentials") => match header("x-amz-sso_bearer_token").as_deref() {
            Some(SSO_TOKEN) => Ok(format!(
                r#"{{"roleCredentials":{{"accessKeyId":"{ROLE_KEY}","secretAccessKey":"{ROLE_SECRET}","sessionToken":"t","expiration":{EXPIRATION_MS}}}}}"#
            )),
            _ => Err((401, "another token")),
        },
        ("PUT", "/latest/api/token") => {
            header("x-aws-ec2-metadata-token-ttl-seconds").map(|_| "imds-token".into()).ok_or((400, "no time"))
        }
        ("GET", path) if path.starts_with("/latest/") => {
            match (header("x-aws-ec2-metadata-token").as_deref(), path.rsplit_once("/security-credentials/")) {
                (Some("imds-token"), Some((_, ""))) => Ok("test-role".into()),
                (Some("imds-token"), Some((_, "test-role"))) => Ok(credentials_json("Token")),
                (Some("imds-token"), _) => Err((404, "no such page")),
                _ => Err((401, "no session token")),
            }
        }
        ("GET", "/container") => header("authorization").map(|_| credentials_json("Token")).ok_or((401, "no token")),
        _ => Err((404, "no such page")),
    };
    let (status, body) = answer.map_or_else(|(status, why)| (status, why.to_owned()), |body| (200, body));
    let mut to = client;
    write!(to, "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())?;
    to.flush()
}

fn credentials_json(token: &str) -> String {
    format!(
        r#"{{"Code":"Success","AccessKeyId":"{ROLE_KEY}","SecretAccessKey":"{ROLE_SECRET}","{token}":"t","Expiration":"{CREDENTIALS_EXPIRATION}"}}"#
    )
}

fn sts_answer(action: &str) -> String {
    format!(
        "<{action}Response><{action}Result><Credentials><AccessKeyId>{ROLE_KEY}</AccessKeyId>\
         <SecretAccessKey>{ROLE_SECRET}</SecretAccessKey><SessionToken>t</SessionToken>\
         <Expiration>{CREDENTIALS_EXPIRATION}</Expiration></Credentials></{action}Result></{action}Response>"
    )
}
