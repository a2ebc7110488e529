//! The plugin's loop: follows the configuration file, the node's HCAs, the plugin's sockets and kubelet's, and reacts to changes.
//! Answers to kubelet are given elsewhere.

use crate::advertised::AdvertisedResource;
use crate::cdi::{self, LockedMemory};
use crate::kubelet::{self, register_resource};
use crate::metrics::{ObservedResource, PluginStatus, ResourceCounters};
use crate::node_watch::NodeReader;
use crate::server::{FileIdentity, ResourceSocket, file_identity};
use crate::service::ResourceService;
use spurline_fabric::Severity;
use spurline_kube_devices::{NodeHcas, PluginConfig, ResourceConfig, lint_node, read_config};
use spurline_types::fault::Fault;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// Time between two looks at sockets: how long a restart of kubelet goes unnoticed.
const SOCKET_INTERVAL: Duration = Duration::from_millis(500);
/// Time between two looks at the configuration file.
const CONFIG_INTERVAL: Duration = Duration::from_secs(2);
/// kubelet opens a stream within this time after a registration.
const STREAM_PATIENCE: Duration = Duration::from_secs(15);
/// Longest time between two registrations that fail.
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Largest configuration; a ConfigMap has at most 1 MiB.
const MAX_CONFIG: u64 = 1 << 20;

/// The plugin's settings.
#[derive(Debug, Clone)]
pub struct PluginSettings {
    /// The configuration file.
    pub config_file: PathBuf,
    /// kubelet's directory of device plugins.
    pub plugin_dir: PathBuf,
    /// A folder laid out like the host's `/`, where `/` is not the host's.
    pub host_root: Option<PathBuf>,
    /// Directory of CDI files; `None` gives pods device nodes.
    pub cdi_dir: Option<PathBuf>,
    /// The limit of locked memory of containers with a device, by a hook in the CDI files; `None` leaves the runtime's.
    pub cdi_memlock: Option<LockedMemory>,
    /// Time between two reads of HCA states.
    pub health_interval: Duration,
}

/// Why a plugin ends.
#[derive(Debug)]
enum PluginEnd {
    /// By request.
    Asked,
    /// The loop panicked, with this message.
    Panicked(String),
}

/// A running plugin.
#[derive(Debug)]
pub struct RunningPlugin {
    status: Arc<PluginStatus>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    ends: mpsc::Sender<PluginEnd>,
    ended: mpsc::Receiver<PluginEnd>,
}

impl RunningPlugin {
    /// The state, for the metrics page.
    pub fn status(&self) -> Arc<PluginStatus> {
        Arc::clone(&self.status)
    }

    /// A function that ends [`RunningPlugin::wait`], for a signal handler.
    pub fn stopper(&self) -> impl Fn() + Send + 'static {
        let ends = self.ends.clone();
        move || drop(ends.send(PluginEnd::Asked))
    }

    /// Waits until the stopper is called, then ends the plugin.
    ///
    /// # Errors
    /// When the loop panics: nothing is served any more, so the process has to end and be started anew.
    pub fn wait(&mut self) -> Result<(), Fault> {
        let end = self.ended.recv();
        self.stop();
        match end {
            Ok(PluginEnd::Panicked(why)) => Err(Fault::failed(
                format!("the plugin's loop panicked: {why}"),
                "this is a defect: report it with the message above; started again, the plugin serves its resources anew",
            )),
            Ok(PluginEnd::Asked) | Err(_) => Ok(()),
        }
    }

    /// Ends the plugin: streams are closed and sockets removed.
    pub fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for RunningPlugin {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts the plugin. A missing kubelet is no error: the plugin registers as soon as kubelet runs.
///
/// # Errors
/// When the configuration is missing or wrong, or sockets can't be made in kubelet's directory.
pub fn start_plugin(settings: PluginSettings) -> Result<RunningPlugin, Fault> {
    let text = read_file(&settings.config_file).map_err(|why| {
        Fault::missing(why, "--config-file names the plugin's configuration; `spurline k8s discover` prints one")
    })?;
    let config = check_config(&settings, &text)
        .map_err(|why| Fault::usage(why, "`spurline k8s lint --config FILE` explains every finding"))?;
    if let Some(root) = &settings.host_root
        && !root.join("sys/class").is_dir()
    {
        return Err(Fault::missing(
            format!("--host-root {}: there is no sys/class in it, so it shows no device of the host", root.display()),
            "mount the host's /sys at DIR/sys and name DIR (hostPath /sys)",
        ));
    }
    if !settings.plugin_dir.is_dir() {
        return Err(Fault::missing(
            format!("{} is no directory", settings.plugin_dir.display()),
            "mount kubelet's directory there (hostPath /var/lib/kubelet/device-plugins), or name it with --plugin-dir",
        ));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Fault::failed(format!("the plugin's runtime: {error}"), ""))?;
    let status = Arc::new(PluginStatus::default());
    let mut plugin = DevicePluginLoop::new(settings, Arc::clone(&status), text);
    {
        // Sockets are registered with the runtime's reactor.
        let _inside = runtime.enter();
        plugin.apply(&config)?;
    }
    let (stop, stopped) = oneshot::channel();
    let (ends, ended) = mpsc::channel();
    let panicked = ends.clone();
    let thread = std::thread::Builder::new()
        .name("device-plugin".to_owned())
        .spawn(move || {
            // The loop's values are dropped by unwinding: the sockets are gone before the end is reported.
            let result = catch_unwind(AssertUnwindSafe(|| {
                runtime.block_on(async move {
                    tokio::select! {
                        () = plugin.run() => {}
                        _ = stopped => {}
                    }
                    drop(plugin);
                    // Streams get time to end, so that kubelet notices the end before the process is gone.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                });
            }));
            runtime.shutdown_background();
            if let Err(panic) = result {
                let _ = panicked.send(PluginEnd::Panicked(panic_message(panic.as_ref())));
            }
        })
        .map_err(|error| Fault::failed(format!("the plugin's thread: {error}"), ""))?;
    Ok(RunningPlugin { status, stop: Some(stop), thread: Some(thread), ends, ended })
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

fn read_file(path: &std::path::Path) -> Result<String, String> {
    let length = std::fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))?.len();
    if length > MAX_CONFIG {
        return Err(format!("{}: {length} bytes are no configuration", path.display()));
    }
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The configuration; warnings go to the log.
fn check_config(settings: &PluginSettings, text: &str) -> Result<PluginConfig, String> {
    let name = settings.config_file.display().to_string();
    let reading = read_config(text, &name);
    for finding in reading.findings.iter().filter(|f| f.severity == Severity::Warning) {
        tracing::warn!("{} {}: {}; {}", finding.id, finding.subject, finding.evidence, finding.remedy);
    }
    reading.config.ok_or_else(|| {
        let errors = reading.findings.iter().filter(|f| f.severity == Severity::Error);
        format!(
            "{name}: {}",
            errors
                .map(|f| if f.subject == name {
                    format!("{} ({})", f.evidence, f.remedy)
                } else {
                    format!("{}: {} ({})", f.subject, f.evidence, f.remedy)
                })
                .collect::<Vec<_>>()
                .join("; ")
        )
    })
}

/// A resource: socket and registration.
struct ServedResource {
    config: ResourceConfig,
    state: watch::Sender<Arc<AdvertisedResource>>,
    counters: Arc<ResourceCounters>,
    socket: Option<ResourceSocket>,
    /// kubelet's socket at the time of the registration.
    kubelet: Option<FileIdentity>,
    registered_at: Option<Instant>,
    retry_at: Instant,
    backoff: Duration,
    last_error: Option<String>,
}

struct DevicePluginLoop {
    settings: PluginSettings,
    reader: NodeReader,
    status: Arc<PluginStatus>,
    config_text: String,
    /// A text that was refused, so that the refusal is reported once.
    refused_text: Option<String>,
    update_interval: Option<Duration>,
    node: NodeHcas,
    resources: Vec<ServedResource>,
}

impl DevicePluginLoop {
    fn new(settings: PluginSettings, status: Arc<PluginStatus>, config_text: String) -> Self {
        let reader = NodeReader { host_root: settings.host_root.clone() };
        let node = reader.scan();
        DevicePluginLoop {
            settings,
            reader,
            status,
            config_text,
            refused_text: None,
            update_interval: None,
            node,
            resources: Vec::new(),
        }
    }

    async fn run(&mut self) {
        let now = Instant::now();
        let mut next_health = now;
        let mut next_config = now;
        let mut next_scan = now;
        loop {
            let now = Instant::now();
            if now >= next_config {
                next_config = now + CONFIG_INTERVAL;
                self.follow_config();
            }
            if let Some(interval) = self.update_interval
                && now >= next_scan + interval
            {
                next_scan = now;
                next_health = now + self.settings.health_interval;
                let reader = self.reader.clone();
                self.follow_node(move || reader.scan()).await;
            } else if now >= next_health {
                next_health = now + self.settings.health_interval;
                let reader = self.reader.clone();
                let node = self.node.clone();
                self.follow_node(move || reader.refresh(&node)).await;
                self.follow_cdi();
            }
            self.follow_sockets().await;
            tokio::time::sleep(SOCKET_INTERVAL).await;
        }
    }

    /// Takes over a changed configuration file; a wrong file is reported once and the former configuration stays in force.
    fn follow_config(&mut self) {
        let text = match read_file(&self.settings.config_file) {
            Ok(text) => text,
            Err(why) => return self.report_config(why),
        };
        if text == self.config_text {
            self.refused_text = None;
            *self.status.config_error.lock() = None;
            return;
        }
        if self.refused_text.as_ref() == Some(&text) {
            return;
        }
        let config = check_config(&self.settings, &text);
        match config.and_then(|config| self.apply(&config).map_err(|fault| fault.to_string())) {
            Ok(()) => {
                tracing::info!("{}: a new configuration is in force", self.settings.config_file.display());
                self.config_text = text;
                self.refused_text = None;
                *self.status.config_error.lock() = None;
            }
            Err(why) => {
                self.refused_text = Some(text);
                self.report_config(why);
            }
        }
    }

    fn report_config(&self, why: String) {
        let mut last = self.status.config_error.lock();
        if last.as_ref() != Some(&why) {
            tracing::error!("the former configuration stays in force: {why}");
            *last = Some(why);
        }
    }

    /// Makes the resources those of `config`: new resources are served, changed resources updated, others removed.
    fn apply(&mut self, config: &PluginConfig) -> Result<(), Fault> {
        for finding in lint_node(config, &self.node) {
            let line = format!("{} {}: {}", finding.id, finding.subject, finding.evidence);
            match finding.severity {
                Severity::Info => tracing::info!("{line}"),
                _ => tracing::warn!("{line}; {}", finding.remedy),
            }
        }
        self.update_interval = config.update_interval;
        let names: Vec<String> = config.resources.iter().map(ResourceConfig::resource).collect();
        let (kept, removed) = std::mem::take(&mut self.resources)
            .into_iter()
            .partition::<Vec<_>, _>(|r| names.contains(&r.config.resource()));
        self.resources = kept;
        for resource in removed {
            let name = resource.config.resource();
            tracing::info!("{name} is no longer configured: kubelet sets its capacity to 0");
        }
        if let Some(dir) = &self.settings.cdi_dir {
            for (file, error) in cdi::remove_other_specs(dir, &names) {
                tracing::warn!("{}: a CDI file of a former configuration stays: {error}", file.display());
            }
        }
        for config in &config.resources {
            let state = AdvertisedResource::of_node(config, &self.node);
            let name = config.resource();
            match self.resources.iter_mut().find(|r| r.config.resource() == name) {
                Some(served) => served.config = config.clone(),
                None => {
                    let mut served = ServedResource::new(config.clone());
                    served.serve(&self.settings).map_err(|error| socket_fault(&self.settings, &error))?;
                    self.resources.push(served);
                }
            }
            self.advertise(&name, state);
        }
        let observed = self.resources.iter().map(|r| ObservedResource {
            resource: r.config.resource(),
            state: r.state.subscribe(),
            counters: Arc::clone(&r.counters),
        });
        self.status.set_resources(observed.collect());
        self.status.loads.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Reads the node on a thread that may wait, and advertises what changed.
    async fn follow_node(&mut self, read: impl FnOnce() -> NodeHcas + Send + 'static) {
        let node = match tokio::task::spawn_blocking(read).await {
            Ok(node) => node,
            Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
            Err(_) => return,
        };
        if node == self.node {
            return;
        }
        self.node = node;
        let states: Vec<(String, AdvertisedResource)> = self
            .resources
            .iter()
            .map(|r| (r.config.resource(), AdvertisedResource::of_node(&r.config, &self.node)))
            .collect();
        for (name, state) in states {
            self.advertise(&name, state);
        }
    }

    /// Writes CDI files again that could not be written, or that someone removed.
    fn follow_cdi(&mut self) {
        let Some(dir) = &self.settings.cdi_dir else { return };
        let due: Vec<(String, AdvertisedResource)> = self
            .resources
            .iter()
            .filter(|r| {
                let state = r.state.borrow();
                state.cdi_error.is_some()
                    || (state.has_device_nodes() && !cdi::file_of(dir, &r.config.resource()).exists())
            })
            .map(|r| (r.config.resource(), AdvertisedResource::of_node(&r.config, &self.node)))
            .collect();
        for (name, state) in due {
            self.advertise(&name, state);
        }
    }

    fn advertise(&mut self, name: &str, mut state: AdvertisedResource) {
        let Some(served) = self.resources.iter().find(|r| r.config.resource() == name) else { return };
        let before = Arc::clone(&served.state.borrow());
        let first = served.counters.registrations.load(Ordering::Relaxed) == 0 && before.hcas.is_empty();
        if let Some(dir) = &self.settings.cdi_dir
            && let Err(error) = cdi::write_spec(dir, name, &state, self.settings.cdi_memlock)
        {
            // A pod with the name of a device that no file describes would be admitted, and not start.
            let file = cdi::file_of(dir, name);
            state.refuse_cdi(format!("its CDI file {} can't be written: {error}", file.display()));
        }
        if *before == state && !first {
            return;
        }
        log_changes(name, &before, &state);
        log_cdi(name, &before, &state);
        served.state.send_replace(Arc::new(state));
    }

    /// Renews sockets that were removed and registrations that do not hold any more.
    async fn follow_sockets(&mut self) {
        let kubelet = file_identity(&self.settings.plugin_dir.join(kubelet::SOCKET));
        for served in &mut self.resources {
            served.follow(&self.settings, kubelet).await;
        }
    }
}

impl ServedResource {
    fn new(config: ResourceConfig) -> Self {
        ServedResource {
            config,
            state: watch::Sender::new(Arc::default()),
            counters: Arc::default(),
            socket: None,
            kubelet: None,
            registered_at: None,
            retry_at: Instant::now(),
            backoff: SOCKET_INTERVAL,
            last_error: None,
        }
    }

    fn serve(&mut self, settings: &PluginSettings) -> std::io::Result<()> {
        // The former socket ends first: the socket's file may have the name.
        self.socket = None;
        let resource = self.config.resource();
        self.socket = Some(ResourceSocket::bind(&settings.plugin_dir, &resource, |stop| ResourceService {
            resource: resource.as_str().into(),
            state: self.state.subscribe(),
            stop,
            use_cdi: settings.cdi_dir.is_some(),
            counters: Arc::clone(&self.counters),
        })?);
        self.unregister();
        Ok(())
    }

    fn unregister(&mut self) {
        self.registered_at = None;
        self.counters.is_registered.store(false, Ordering::Release);
    }

    async fn follow(&mut self, settings: &PluginSettings, kubelet: Option<FileIdentity>) {
        let name = self.config.resource();
        let now = Instant::now();
        if self.socket.as_ref().is_none_or(ResourceSocket::is_lost) {
            if now < self.retry_at {
                return;
            }
            if self.socket.is_some() {
                tracing::info!("{name}: its socket was removed: kubelet has started anew");
            }
            if let Err(error) = self.serve(settings) {
                self.report_failure(now, &name, format!("{}: {error}", settings.plugin_dir.display()));
                return;
            }
            self.retry_at = now;
        }
        if self.registered_at.is_some() && kubelet != self.kubelet {
            tracing::info!("{name}: kubelet's socket was {}", if kubelet.is_some() { "made anew" } else { "removed" });
            self.unregister();
            self.retry_at = now;
        }
        if let Some(at) = self.registered_at {
            let has_stream = self.counters.streams.load(Ordering::Acquire) > 0;
            if has_stream && now > at + 4 * STREAM_PATIENCE {
                self.backoff = SOCKET_INTERVAL;
            }
            if has_stream || now < at + STREAM_PATIENCE {
                return;
            }
            tracing::warn!(
                "{name}: kubelet closed its stream: it is registered again (has another plugin the resource?)"
            );
            self.unregister();
            self.retry_at = now + self.backoff;
            self.backoff = (2 * self.backoff).min(MAX_BACKOFF);
        }
        if now < self.retry_at {
            return;
        }
        let endpoint = self.socket.as_ref().map(ResourceSocket::file_name).unwrap_or_default();
        match register_resource(&settings.plugin_dir, &name, &endpoint).await {
            Ok(()) => {
                let (slots, healthy) = self.state.borrow().slot_counts();
                tracing::info!("{name}: registered at kubelet, {slots} slots, {healthy} healthy");
                self.counters.registrations.fetch_add(1, Ordering::Relaxed);
                self.counters.is_registered.store(true, Ordering::Release);
                self.registered_at = Some(now);
                self.kubelet = kubelet;
                self.last_error = None;
            }
            Err(why) => self.report_failure(now, &name, why),
        }
    }

    fn report_failure(&mut self, now: Instant, name: &str, why: String) {
        if self.last_error.as_ref() != Some(&why) {
            tracing::warn!("{name} is not registered: {why}; it is tried again");
            self.last_error = Some(why);
        }
        self.retry_at = now + self.backoff;
        self.backoff = (2 * self.backoff).min(MAX_BACKOFF);
    }
}

fn log_cdi(name: &str, before: &AdvertisedResource, now: &AdvertisedResource) {
    match (&before.cdi_error, &now.cdi_error) {
        (last, Some(why)) if last.as_ref() != Some(why) => tracing::error!(
            "{name}: {why}; its slots are unhealthy until it is; mount the host's directory of CDI files (--cdi-dir) \
             writable"
        ),
        (Some(_), None) => tracing::info!("{name}: its CDI file is written"),
        _ => {}
    }
}

fn log_changes(name: &str, before: &AdvertisedResource, now: &AdvertisedResource) {
    if now.hcas.is_empty() {
        tracing::info!("{name}: no HCA of this node matches; 0 slots are advertised");
    }
    if let Some(wanted) = now.table.reduced_from
        && before.table.reduced_from != now.table.reduced_from
    {
        let slots = now.table.slots.len();
        tracing::warn!(
            "{name}: rdmaHcaMax is {wanted}; {slots} slots fit a message of kubelet's API and are advertised"
        );
    }
    for hca in &now.hcas {
        let last = before.hcas.iter().find(|h| h.name == hca.name);
        match (&hca.obstacle, last.map(|h| &h.obstacle)) {
            (Some(why), Some(None) | None) => tracing::warn!("{name}: {} is unhealthy: {why}", hca.name),
            (None, Some(Some(_))) => tracing::info!("{name}: {} is healthy again", hca.name),
            (None, None) => tracing::info!("{name}: {} is advertised", hca.name),
            _ => {}
        }
    }
    for hca in before.hcas.iter().filter(|b| !now.hcas.iter().any(|h| h.name == b.name)) {
        tracing::warn!("{name}: {} is gone, and its slots with it", hca.name);
    }
}

fn socket_fault(settings: &PluginSettings, error: &std::io::Error) -> Fault {
    let dir = settings.plugin_dir.display();
    let remedy = match error.kind() {
        std::io::ErrorKind::PermissionDenied => {
            "run the plugin as root (uid 0, no capability needed) and mount the directory writable"
        }
        std::io::ErrorKind::ReadOnlyFilesystem => "mount the directory writable",
        std::io::ErrorKind::AddrInUse => "end the other device plugins, or remove their DaemonSet",
        _ => "check the directory; kubelet's is /var/lib/kubelet/device-plugins",
    };
    Fault::missing(format!("no socket in {dir}: {error}"), remedy)
}
