//! A real API server with its etcd, shared by the tests of this program that run at the same time, and its administrator.
//! It makes what controllers of a cluster would make: the default account of a namespace.

use parking_lot::Mutex;
use serde_json::{Value, json};
use spurline_rig::program::{LIMIT, tempdir, wait_for};
use spurline_testkit::EtcdServer;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// The token of the administrator.
const ADMIN: &str = "administrator-of-the-tests";

/// An API server, ended when the last test that uses it ends.
pub struct ClusterRig {
    dir: tempfile::TempDir,
    tools: PathBuf,
    port: u16,
    /// The port of `kubectl proxy`, which speaks plain HTTP.
    plain: u16,
    children: Vec<Child>,
    _etcd: EtcdServer,
}

static SHARED: Mutex<Weak<ClusterRig>> = Mutex::new(Weak::new());

impl ClusterRig {
    /// The server; `None` with a SKIP where it can't be had.
    pub fn shared() -> Option<Arc<Self>> {
        let mut shared = SHARED.lock();
        if let Some(running) = shared.upgrade() {
            return Some(running);
        }
        if !EtcdServer::is_installed() {
            return None;
        }
        let started = Arc::new(Self::start(spurline_testkit::go_program("kubernetes", "kubernetes")?));
        *shared = Arc::downgrade(&started);
        Some(started)
    }

    fn start(tools: PathBuf) -> Self {
        let dir = tempdir();
        let at = |name: &str| dir.path().join(name);
        let etcd = EtcdServer::start(&at("etcd"), 0, "http", &[]).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        std::fs::write(at("account.key"), key.serialize_pem()).unwrap();
        std::fs::write(at("account.pub"), key.public_key_pem()).unwrap();
        std::fs::write(at("tokens.csv"), format!("{ADMIN},admin,1,\"system:masters\"\n")).unwrap();
        let policy =
            "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n";
        std::fs::write(at("audit.yaml"), policy).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        write_kubeconfig(&at("kubeconfig"), port, ADMIN);
        let mut command = Command::new(tools.join("kube-apiserver"));
        command.arg(format!("--etcd-servers=http://127.0.0.1:{}", etcd.port()));
        command.arg(format!("--secure-port={port}")).args(["--bind-address=127.0.0.1", "--allow-privileged=true"]);
        command.args(["--service-cluster-ip-range=10.96.0.0/24", "--authorization-mode=RBAC"]);
        command.arg("--service-account-issuer=https://kubernetes.default.svc");
        for (flag, file) in [
            ("service-account-signing-key-file", "account.key"),
            ("service-account-key-file", "account.pub"),
            ("token-auth-file", "tokens.csv"),
            ("audit-policy-file", "audit.yaml"),
            ("audit-log-path", "audit.log"),
            ("cert-dir", "cert"),
        ] {
            command.arg(format!("--{flag}={}", at(file).display()));
        }
        let log = std::fs::File::create(at("apiserver.log")).unwrap();
        let mut server = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let mut command = Command::new(tools.join("kubectl"));
        command.arg("--kubeconfig").arg(at("kubeconfig")).args(["proxy", "--port=0"]);
        let mut proxy = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(proxy.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let plain = line.trim().rsplit(':').next().unwrap().parse().unwrap_or_else(|e| panic!("{line}: {e}"));
        let started = Instant::now();
        let mut rig = ClusterRig { dir, tools, port, plain, children: Vec::new(), _etcd: etcd };
        while rig.send("GET", "/readyz", "", "").is_none_or(|(status, _)| status != 200) {
            let ended = server.try_wait().unwrap();
            if ended.is_some() || started.elapsed() > LIMIT {
                let log = std::fs::read_to_string(rig.dir.path().join("apiserver.log")).unwrap();
                panic!("the API server does not start: {ended:?}\n{log}");
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        rig.children = vec![proxy, server];
        rig.namespace(&json!({ "metadata": { "name": "default" } }));
        rig
    }

    /// Sends a request as the administrator; status and body, or `None` without an answer.
    fn send(&self, method: &str, path: &str, kind: &str, body: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.plain)).ok()?;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {length}");
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let status = text.split(' ').nth(1)?.parse().ok()?;
        Some((status, text.split_once("\r\n\r\n")?.1.to_owned()))
    }

    /// The same with objects; status and object.
    pub fn call(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, text) = self.send(method, path, kind, &body).unwrap_or_else(|| panic!("no answer to {path}"));
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    /// An object; `None` when it does not exist.
    pub fn get(&self, path: &str) -> Option<Value> {
        let (status, object) = self.call("GET", path, &Value::Null);
        assert!(status == 200 || status == 404, "{path}: {status} {object}");
        (status == 200).then_some(object)
    }

    /// The objects of a list.
    pub fn list(&self, path: &str) -> Vec<Value> {
        self.get(path).and_then(|list| Some(list["items"].as_array()?.clone())).unwrap_or_default()
    }

    /// Makes an object; its content as the server keeps it.
    pub fn create(&self, path: &str, object: &Value) -> Value {
        let (status, made) = self.call("POST", path, object);
        assert_eq!(status, 201, "{path}: {made}");
        made
    }

    /// Makes a namespace with its default account, unless it is there.
    pub fn namespace(&self, object: &Value) {
        let name = object["metadata"]["name"].as_str().unwrap();
        for (path, object) in [
            ("/api/v1/namespaces".to_owned(), object),
            (format!("/api/v1/namespaces/{name}/serviceaccounts"), &json!({ "metadata": { "name": "default" } })),
        ] {
            let (status, answer) = self.call("POST", &path, object);
            assert!([201, 409].contains(&status), "{answer}");
        }
    }

    /// Runs kubectl as the administrator, with `input` at its standard input.
    pub fn kubectl(&self, words: &[&str], input: &str) -> Output {
        let mut command = Command::new(self.tools.join("kubectl"));
        command.arg("--kubeconfig").arg(self.dir.path().join("kubeconfig")).args(words);
        command.env("HOME", self.dir.path());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut pipe = child.stdin.take().unwrap();
        let input = input.to_owned();
        let writer = std::thread::spawn(move || drop(pipe.write_all(input.as_bytes())));
        let out = child.wait_with_output().unwrap();
        writer.join().unwrap();
        out
    }

    /// A program that was built with the server.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.tools.join(name)
    }

    /// Everything that the kubelet gives to a pod of this account: its files in `dir`, and the variables that name the server.
    pub fn account_files(&self, dir: &Path, namespace: &str, account: &str) -> Vec<(String, String)> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let spec = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {} });
        let token = self.create(&path, &spec);
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("token"), token["status"]["token"].as_str().unwrap()).unwrap();
        std::fs::write(dir.join("namespace"), namespace).unwrap();
        std::fs::copy(self.dir.path().join("cert/apiserver.crt"), dir.join("ca.crt")).unwrap();
        [("KUBERNETES_SERVICE_HOST", "127.0.0.1".to_owned()), ("KUBERNETES_SERVICE_PORT", self.port.to_string())]
            .map(|(name, value)| (name.to_owned(), value))
            .into()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// A file in `dir` for clients: of the administrator, or of an account with its namespace and name.
    pub fn kubeconfig(&self, dir: &Path, account: Option<(&str, &str)>) -> PathBuf {
        let Some((namespace, name)) = account else { return self.dir.path().join("kubeconfig") };
        self.account_files(dir, namespace, name);
        let path = dir.join("kubeconfig");
        write_kubeconfig(&path, self.port, &std::fs::read_to_string(dir.join("token")).unwrap());
        path
    }

    /// What an account has done so far: `NAMESPACE VERB RESOURCE`, and the status of refusals.
    pub fn requests_of(&self, namespace: &str, account: &str) -> BTreeSet<String> {
        let user = format!("system:serviceaccount:{namespace}:{account}");
        let log = std::fs::read_to_string(self.dir.path().join("audit.log")).unwrap();
        let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        entries
            .filter(|entry| entry["user"]["username"] == user.as_str())
            .map(|entry| {
                let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let object = &entry["objectRef"];
                let refused = if entry["responseStatus"]["code"] == 403 { " refused" } else { "" };
                format!(
                    "{} {} {}{refused}",
                    word(&object["namespace"]),
                    word(&entry["verb"]),
                    word(&object["resource"])
                )
            })
            .collect()
    }

    /// Waits until an event about the object with this uid has the reason; its message.
    pub fn wait_event(&self, namespace: &str, uid: &str, reason: &str) -> String {
        let path = format!("/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.uid%3D{uid}");
        let mut found = None;
        wait_for(&format!("the event {reason}"), || {
            found = self.list(&path).into_iter().find(|event| event["reason"] == reason);
            found.is_some()
        });
        found.unwrap()["message"].as_str().unwrap().to_owned()
    }
}

/// Writes the file with which a client reaches the server.
fn write_kubeconfig(path: &Path, port: u16, token: &str) {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "user" } }],
        "clusters": [{ "name": "test", "cluster": {
            "server": format!("https://127.0.0.1:{port}"), "insecure-skip-tls-verify": true,
        } }],
        "users": [{ "name": "user", "user": { "token": token } }],
    });
    std::fs::write(path, config.to_string()).unwrap();
}

impl Drop for ClusterRig {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
