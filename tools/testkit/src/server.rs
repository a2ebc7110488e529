//! The embedded S3 server: a listener on loopback with a separate runtime. Deliberately listens nowhere else, with a public key.

use crate::dir_s3::DirS3;
use crate::memory_s3::{MemoryS3, PartAssembly};
use crate::{ACCESS_KEY, ROLE_KEY, ROLE_SECRET, SECRET_KEY};
use hyper_util::rt::TokioIo;
use parking_lot::RwLock;
use s3s::auth::{S3Auth, SecretKey};
use s3s::config::{S3Config, StaticConfigProvider};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3Result, s3_error};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// Any free port of 127.0.0.1.
const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// The access keys that a server accepts, with the secrets.
#[derive(Clone)]
struct AccessKeys(Arc<RwLock<HashMap<String, SecretKey>>>);

impl Default for AccessKeys {
    fn default() -> Self {
        let keys = [(ACCESS_KEY, SECRET_KEY), (ROLE_KEY, ROLE_SECRET)];
        AccessKeys(Arc::new(RwLock::new(keys.map(|(id, secret)| (id.to_owned(), SecretKey::from(secret))).into())))
    }
}

#[async_trait::async_trait]
impl S3Auth for AccessKeys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        self.0.read().get(access_key).cloned().ok_or_else(|| s3_error!(InvalidAccessKeyId))
    }
}

/// An S3 server that ends when dropped.
pub struct S3Server {
    address: SocketAddr,
    keys: AccessKeys,
    memory: Option<MemoryS3>,
    /// Taken only by drop.
    runtime: Option<Runtime>,
}

impl S3Server {
    /// Serves `dir`, a directory of buckets, on a free port. Writes leave small files that start with a dot in
    /// `dir` itself, as s3s-fs does.
    ///
    /// # Errors
    /// When the directory or the port can't be used.
    pub fn start(dir: &Path) -> io::Result<Self> {
        let mut builder = S3ServiceBuilder::new(DirS3::new(dir)?);
        let keys = AccessKeys::default();
        builder.set_auth(keys.clone());
        Self::serve(builder, ANY_PORT, keys, None)
    }

    /// Serves buckets in memory, where every valid key may exist.
    ///
    /// # Errors
    /// When no port is free.
    pub fn in_memory() -> io::Result<Self> {
        Self::in_memory_on(ANY_PORT)
    }

    /// As [`S3Server::in_memory`], at a given address.
    pub fn in_memory_on(at: SocketAddr) -> io::Result<Self> {
        let memory = MemoryS3::default();
        let mut builder = S3ServiceBuilder::new(memory.clone());
        let keys = AccessKeys::default();
        builder.set_auth(keys.clone());
        // Wide enough for requests to a proxy with another clock.
        let mut config = S3Config::default();
        config.presigned_url_max_skew_time_secs = 7200;
        builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(config))));
        Self::serve(builder, at, keys, Some(memory))
    }

    /// Serves buckets in memory without authentication.
    ///
    /// # Errors
    /// As [`S3Server::in_memory`].
    pub fn in_memory_open() -> io::Result<Self> {
        let memory = MemoryS3::default();
        Self::serve(S3ServiceBuilder::new(memory.clone()), ANY_PORT, AccessKeys::default(), Some(memory))
    }

    fn serve(
        builder: S3ServiceBuilder,
        at: SocketAddr,
        keys: AccessKeys,
        memory: Option<MemoryS3>,
    ) -> io::Result<Self> {
        let service = builder.build();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("testkit-s3")
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind(at))?;
        let address = listener.local_addr()?;
        runtime.spawn(accept_clients(listener, service));
        Ok(S3Server { address, keys, memory, runtime: Some(runtime) })
    }

    /// From now on the times of objects in memory are this far behind those of the host.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn set_clock_behind(&self, by: Duration) {
        self.memory.as_ref().expect("a server in memory").set_clock_behind(by);
    }

    /// From now on a server in memory does not offer changes with a condition.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn refuse_conditions(&self) {
        self.memory.as_ref().expect("a server in memory").refuse_conditions();
    }

    /// How many requests to make the object of an upload a server in memory has got.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn completes(&self) -> usize {
        self.memory.as_ref().expect("a server in memory").completes()
    }

    /// From now on a server in memory makes the objects of uploads in this way.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn set_assembly(&self, assembly: PartAssembly) {
        self.memory.as_ref().expect("a server in memory").set_assembly(assembly);
    }

    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The endpoint URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Accepts another access key from now on.
    pub fn allow_key(&self, id: &str, secret: &str) {
        self.keys.0.write().insert(id.to_owned(), SecretKey::from(secret));
    }

    /// Refuses an access key from now on.
    pub fn revoke_key(&self, id: &str) {
        self.keys.0.write().remove(id);
    }

    /// Creates a bucket of a server in memory.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn create_bucket(&self, bucket: &str) {
        self.memory.as_ref().expect("a server in memory").create_bucket(bucket);
    }

    /// Puts an object into a server in memory and returns the etag.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn put(&self, bucket: &str, key: &str, bytes: &[u8]) -> String {
        self.memory.as_ref().expect("a server in memory").put(bucket, key, bytes.to_vec().into())
    }

    /// Puts an object with attributes of the user into a server in memory.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn put_with_metadata(&self, bucket: &str, key: &str, bytes: &[u8], metadata: &[(&str, &str)]) {
        let memory = self.memory.as_ref().expect("a server in memory");
        memory.put_with_metadata(bucket, key, bytes.to_vec().into(), metadata);
    }

    /// Puts an object of a storage class into a server in memory.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn put_with_class(&self, bucket: &str, key: &str, bytes: &[u8], class: &str) {
        let memory = self.memory.as_ref().expect("a server in memory");
        memory.put_with_class(bucket, key, bytes.to_vec().into(), class);
    }

    /// From now on a server in memory refuses objects without an encryption, as a bucket's policy does.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn want_encryption(&self) {
        self.memory.as_ref().expect("a server in memory").want_encryption();
    }

    /// Storage class, encryption and its key of an object of a server in memory, each empty where none was named.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn kept_as(&self, bucket: &str, key: &str) -> Option<[String; 3]> {
        self.memory.as_ref().expect("a server in memory").kept_as(bucket, key)
    }

    /// The value of an attribute of the user that an object of a server in memory has.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn metadata(&self, bucket: &str, key: &str, name: &str) -> Option<String> {
        self.memory.as_ref().expect("a server in memory").metadata(bucket, key, name)
    }

    /// The bytes of an object of a server in memory.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn bytes(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        self.memory.as_ref().expect("a server in memory").bytes(bucket, key).map(|bytes| bytes.to_vec())
    }

    /// The names of all objects of a bucket of a server in memory.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn keys(&self, bucket: &str) -> Vec<String> {
        self.memory.as_ref().expect("a server in memory").keys(bucket)
    }

    /// Begins an upload to a server in memory, as another program does.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn begin_upload(&self, bucket: &str, key: &str) {
        self.memory.as_ref().expect("a server in memory").begin_upload(bucket, key);
    }

    /// The number of uploads to a server in memory that are neither completed nor aborted.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn open_uploads(&self) -> usize {
        self.memory.as_ref().expect("a server in memory").open_uploads()
    }

    /// The number of objects, parts and uploads that were ever made in a server in memory.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn writes(&self) -> u64 {
        self.memory.as_ref().expect("a server in memory").writes()
    }

    /// Removes an object from a server in memory.
    ///
    /// # Panics
    /// When the server serves a directory.
    pub fn remove(&self, bucket: &str, key: &str) {
        self.memory.as_ref().expect("a server in memory").remove(bucket, key);
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn accept_clients(listener: TcpListener, service: S3Service) {
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        let _ = socket.set_nodelay(true);
        let service = service.clone();
        tokio::spawn(async move {
            // A client that disconnects is not an error of the server.
            let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
        });
    }
}
