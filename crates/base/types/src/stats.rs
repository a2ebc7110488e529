//! Every counter and gauge of Spurline, declared once with unit and meaning. `stats`, the JSON form and the Prometheus page are
//! all generated from this table. Read from JSON, [`Stats`] has the counters of another process: unknown counters are ignored,
//! and missing counters are 0.
//!
//! An update is a relaxed atomic add: no lock, no allocation.

use crate::path_stats::PathTable;
use crate::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A counter that only grows, or a gauge.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Metric(AtomicU64);

impl Metric {
    /// Adds to a counter or a gauge.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    /// Subtracts from a gauge.
    pub fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }
    /// Adds a duration in microseconds.
    pub fn add_us(&self, d: Duration) {
        self.add(d.as_micros() as u64);
    }
    /// Sets a gauge.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }
    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether a metric only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows; meaningful as a rate.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// The name and meaning of a metric.
#[derive(Debug, Clone, Copy)]
pub struct MetricInfo {
    /// The section in `stats`.
    pub section: &'static str,
    /// The name in that section, and the key in the JSON.
    pub name: &'static str,
    /// Counter or gauge.
    pub kind: MetricKind,
    /// The unit: `bytes`, `operations`, `microseconds`, ….
    pub unit: &'static str,
    /// A sentence.
    pub help: &'static str,
}

macro_rules! sections {
    ($( $(#[$sdoc:meta])* $section:ident : $Struct:ident { $( $name:ident : $kind:ident $unit:literal $help:literal ),+ $(,)? } )+) => {
        $( $(#[$sdoc])*
        #[derive(Debug, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $Struct { $( #[doc = concat!($help, " Unit: ", $unit, ".")] pub $name: Metric ),+ } )+

        /// All counters of a process (a mount or a node).
        #[derive(Debug, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Stats {
            $( $(#[$sdoc])* pub $section: $Struct, )+
            /// Each path to each peer.
            pub paths: PathTable,
        }

        /// Every metric, in display order.
        pub const METRICS: &[MetricInfo] = &[ $( $( MetricInfo {
            section: stringify!($section), name: stringify!($name), kind: MetricKind::$kind, unit: $unit, help: $help,
        } ),+ ),+ ];

        impl Stats {
            /// Calls `f` with every metric and the current value, in the order of [`METRICS`].
            pub fn for_each(&self, mut f: impl FnMut(&'static MetricInfo, u64)) {
                let mut table = METRICS.iter();
                $( $( if let Some(info) = table.next() { f(info, self.$section.$name.get()); } )+ )+
            }
        }
    };
}

sections! {
    /// Resources used by this process.
    usage: Usage {
        cpu_us: Counter "microseconds" "CPU time of this process, user and system.",
        rss_bytes: Gauge "bytes" "Resident memory of this process.",
        buffer_bytes: Gauge "bytes" "Memory in use of the budget of --buffer-size.",
        buffer_limit_bytes: Gauge "bytes" "The budget of --buffer-size.",
        uptime_seconds: Gauge "seconds" "Time since this process started.",
    }
    /// Requests from the kernel.
    fuse: Fuse {
        ops: Counter "operations" "FUSE requests answered.",
        errors: Counter "operations" "FUSE requests answered with an error other than ENOENT, ENOSYS and ENODATA.",
        busy_us: Counter "microseconds" "Time spent on FUSE requests, summed over requests.",
        read_ops: Counter "operations" "Reads answered.",
        read_bytes: Counter "bytes" "Bytes handed to the kernel by reads; passthrough reads never reach this process.",
        read_us: Counter "microseconds" "Time spent on reads, summed over reads.",
        write_ops: Counter "operations" "Writes answered.",
        write_bytes: Counter "bytes" "Bytes written through this process; passthrough writes never reach it.",
        write_us: Counter "microseconds" "Time spent on writes, summed over writes.",
        change_ops: Counter "operations" "Changes of names and attributes made.",
        lookup_ops: Counter "operations" "Lookups answered.",
        open_ops: Counter "operations" "Files opened.",
        passthrough_opens: Counter "operations" "Files opened with their cached file handed to the kernel.",
        waiting_ops: Gauge "operations" "Requests of programs that have waited for their answer for three seconds or more, locks aside.",
        longest_wait_seconds: Gauge "seconds" "The longest of these waits; 0 without one.",
        open_handles: Gauge "handles" "File and directory handles open now.",
        inodes: Gauge "inodes" "Inodes the kernel knows now.",
        inode_bytes: Gauge "bytes" "Memory of these inodes in this process.",
        inode_limit_bytes: Gauge "bytes" "The share of --buffer-size for these inodes.",
        forgets_requested: Counter "inodes" "Inodes that the kernel was requested to forget because their memory was over its share.",
    }
    /// Requests of S3 clients.
    s3: S3 {
        ops: Counter "operations" "Requests of S3 clients answered.",
        errors: Counter "operations" "Requests of S3 clients that failed, with a status of 500 or more other than 501.",
        busy_us: Counter "microseconds" "Time from a request of an S3 client to the head of its answer, summed over requests.",
        read_bytes: Counter "bytes" "Bytes of objects that answers to S3 clients have.",
        write_bytes: Counter "bytes" "Bytes of objects taken from S3 clients.",
        connections: Gauge "connections" "Connections of S3 clients.",
        uploads: Gauge "uploads" "Uploads in parts by S3 clients that are under way.",
    }
    /// Bytes written through nodes: of a mount, and the requests that a node answered.
    writes: Writes {
        dirty_bytes: Gauge "bytes" "Bytes that programs have written and that no node has yet.",
        memory_bytes: Gauge "bytes" "Memory of bytes that no node has yet, or that no node has reported as durable.",
        memory_limit_bytes: Gauge "bytes" "The share of --buffer-size for these bytes.",
        sent_ops: Counter "operations" "Writes sent to nodes.",
        sent_bytes: Counter "bytes" "Bytes that nodes have written to the source for this mount.",
        behind_us: Counter "microseconds" "Time from a write until a node had its bytes, summed over the writes sent to nodes.",
        resent_bytes: Counter "bytes" "Bytes sent again because the node that had them was lost before they were durable.",
        sync_ops: Counter "operations" "Syncs of files by nodes.",
        sync_us: Counter "microseconds" "Time spent on them, summed.",
        room_syncs: Counter "operations" "Those that were made because the memory for these bytes was full, or half full.",
        failures: Counter "operations" "Writes that the source refused after the program had gone on, and changes of a bucket's files that were not published; reported at fsync and at close.",
        served_ops: Counter "operations" "Requests of writing mounts that this node answered.",
        served_bytes: Counter "bytes" "Bytes that these brought.",
        served_us: Counter "microseconds" "Time spent on these, summed.",
    }
    /// Staged files of this node: written through mounts, kept on disks of two nodes, and uploaded later.
    stage: Stage {
        acknowledged_objects: Counter "objects" "Objects acknowledged to mounts: on disks of two nodes in two failure domains.",
        acknowledged_bytes: Counter "bytes" "Bytes of these objects.",
        uploaded_objects: Counter "objects" "Staged objects that this node has uploaded to the store.",
        uploaded_bytes: Counter "bytes" "Bytes of these objects.",
        conflicts: Counter "objects" "Staged objects whose name another writer had changed before the upload: both versions are kept.",
        upload_failures: Counter "operations" "Attempts of an upload that failed.",
        overdue: Counter "objects" "Staged objects that were not uploaded before their deadline.",
        lost_objects: Counter "objects" "Acknowledged objects of which no disk has the bytes any more.",
        unsaved_objects: Gauge "objects" "Staged objects that the store does not have yet.",
        unsaved_bytes: Gauge "bytes" "Bytes of these objects.",
        oldest_unsaved_s: Gauge "seconds" "Age of the oldest of these objects; 0 without one.",
        used_bytes: Gauge "bytes" "Bytes on cache disks that staged objects take, of this node and copies for others.",
        size_bytes: Gauge "bytes" "The bytes of --stage-size.",
    }
    /// NFS clients of this mount, where the kernel's NFS server exports the mount.
    export: Export {
        active: Gauge "exports" "1 while the NFS server exports this mount, else 0.",
        clients: Gauge "clients" "Addresses of NFS clients that the server has admitted to this mount.",
        read_bytes: Counter "bytes" "Bytes that NFS clients have read from this mount, since the server took up the export.",
        write_bytes: Counter "bytes" "Bytes that NFS clients have written to this mount, since the server took up the export.",
        stale_handles: Counter "operations" "Requests of NFS clients whose file handle led to no file.",
        threads: Gauge "threads" "Threads of the NFS server, for all of its exports.",
    }
    /// The life of a mount with `--recover`.
    recovery: Recovery {
        has_keeper: Gauge "processes" "1 while this mount has a keeper, which starts its process again.",
        restarts: Gauge "processes" "Processes that have served this mount before the present one.",
        pause_us: Gauge "microseconds" "How long programs waited for the present process.",
        state_bytes: Gauge "bytes" "Memory of the kept state: names and open files that the kernel refers to.",
        not_kept: Gauge "records" "Names and open files that the present process could not keep, for want of room.",
    }
    /// Metadata of the origin.
    metadata: Metadata {
        ops: Counter "operations" "Lookups and listings sent to the origin or to a node.",
        errors: Counter "operations" "Those that failed, except for names that do not exist.",
        lat_us: Counter "microseconds" "Time spent on them, summed.",
        cache_hits: Counter "operations" "Lookups answered from cached metadata.",
        stale_answers: Counter "operations" "Lookups and listings answered past their lifetime, because the origin did not respond (--stale-if-error).",
        silent_origins: Gauge "origins" "Origins that do not respond to lookups and listings now.",
        etagless_buckets: Gauge "buckets" "Buckets whose listings have no ETags: versions are made of size and time.",
        skipped_names: Counter "names" "Names left out of listings: no file can have such a name, or it is a mount of an unreachable server.",
    }
    /// The block store on disks and in memory.
    blockcache: BlockCache {
        hit_bytes: Counter "bytes" "Bytes served from memory or disk of this process.",
        miss_bytes: Counter "bytes" "Bytes that had to be fetched first.",
        mem_hit_bytes: Counter "bytes" "Bytes served from memory.",
        disk_hit_bytes: Counter "bytes" "Bytes served from cache disks.",
        read_ops: Counter "operations" "Reads of cache disks.",
        read_us: Counter "microseconds" "Time spent on reads of cache disks, summed.",
        write_bytes: Counter "bytes" "Bytes written to cache disks.",
        write_us: Counter "microseconds" "Time spent writing to cache disks, summed.",
        write_skipped: Counter "blocks" "Blocks not written to disk: no space, disk not normal, or writers too busy.",
        evictions: Counter "blocks" "Blocks evicted from cache disks.",
        checksum_errors: Counter "blocks" "Blocks whose CRC32C did not match; they were dropped and fetched again.",
        missing_blocks: Counter "blocks" "Blocks whose file was removed from the cache directory or cut; they were fetched again.",
        io_errors: Counter "operations" "Reads and writes of cache disks that failed or took too long.",
        blocks: Gauge "blocks" "Blocks on cache disks.",
        used_bytes: Gauge "bytes" "Bytes on cache disks.",
        capacity_bytes: Gauge "bytes" "Bytes the cache disks may hold.",
        mem_bytes: Gauge "bytes" "Bytes of blocks held in memory.",
        disks_normal: Gauge "disks" "Cache disks in state normal.",
        disks_unstable: Gauge "disks" "Cache disks in state unstable: not used until they answer again.",
        disks_down: Gauge "disks" "Cache disks in state down.",
        prefetch_bytes: Counter "bytes" "Bytes fetched ahead of the reader.",
        followed_files: Counter "files" "Small files fetched ahead, because their reader opens the files of a folder as listed.",
        warmed_bytes: Counter "bytes" "Bytes fetched by jobs.",
        spread_blocks: Gauge "blocks" "Copies of other nodes' hot blocks in memory of this node; dropped when they cool.",
        freed_bytes: Counter "bytes" "Bytes dropped by jobs.",
        pinned_bytes: Gauge "bytes" "Bytes on cache disks that are pinned: never evicted for room.",
        pins_refused: Counter "blocks" "Blocks of a pinned folder stored unpinned, because the pinned share of the disks was full.",
        limited_blocks: Counter "blocks" "Blocks dropped because their folder's time had passed or its quota was full.",
    }
    /// Data exchanged with peers, over any transport.
    remotecache: RemoteCache {
        recv_bytes: Counter "bytes" "Payload bytes received from peers.",
        send_bytes: Counter "bytes" "Payload bytes sent to peers.",
        pulled_bytes: Counter "bytes" "Bytes that a node got from another node of its group instead of the origin.",
        ops: Counter "operations" "Requests sent to peers.",
        served_ops: Counter "operations" "Requests of peers answered.",
        errors: Counter "operations" "Requests to peers that failed.",
        retries: Counter "operations" "Requests to peers sent again.",
        origin_declines: Counter "operations" "Requests for uncached data that this node declined because its origin does not answer; readers use other nodes.",
        hot_answers: Counter "operations" "Answers marked hot, because many readers request their block at once: sent by a node, received by a mount.",
        sent_on: Counter "operations" "Reads redirected from a replica without the block to the node that fetches it for all: by a node, and of a mount.",
        hedges: Counter "operations" "Reads sent to a second node because the first was late.",
        hedges_won: Counter "operations" "Those that the second node answered first.",
        lat_us: Counter "microseconds" "Time from request to answer, summed.",
        connects: Counter "operations" "Connections made to peers.",
        given_up: Counter "peers" "Times a peer with pending requests sent no heartbeat and was abandoned.",
        peers_up: Gauge "peers" "Peers connected now.",
        peers_down: Gauge "peers" "Peers that can't be reached now.",
        peers_slow: Gauge "peers" "Peers that repeatedly answer late: others are preferred.",
    }
    /// RDMA transfers.
    rdma: Rdma {
        write_bytes: Counter "bytes" "Payload bytes written into peers' memory.",
        recv_bytes: Counter "bytes" "Payload bytes peers wrote into this process's memory, or sent within a message.",
        send_bytes: Counter "bytes" "Payload bytes of this process's requests: read by peers from its memory, or sent within a message.",
        read_bytes: Counter "bytes" "Payload bytes read from peers' memory.",
        w_ops: Counter "operations" "RDMA writes.",
        w_us: Counter "microseconds" "Time from the start of an RDMA write to its completion, summed.",
        r_ops: Counter "operations" "Requests whose bytes were read from a peer's memory.",
        r_us: Counter "microseconds" "Time from the start of such a read to its completion, summed.",
        retries: Counter "operations" "Requests sent again over another path because an RDMA path failed.",
        failovers: Counter "operations" "Times an RDMA path failed while it carried data.",
        failbacks: Counter "operations" "Times an RDMA path carried data again after a failure.",
        paths_up: Gauge "paths" "RDMA paths to peers that carry data now.",
        paths_down: Gauge "paths" "RDMA paths to peers that carry none now.",
        near_bytes: Counter "bytes" "Payload bytes in memory of the NUMA node of the rail that carried them, where rails are on several nodes.",
        far_bytes: Counter "bytes" "Payload bytes in memory of another NUMA node than that of the rail that carried them.",
        bounced_bytes: Counter "bytes" "Payload bytes copied through a buffer, as their memory is not registered.",
        connections: Gauge "connections" "RDMA connections of mounts to this node now.",
        connections_limit: Gauge "connections" "Their maximum number.",
    }
    /// TCP transfers.
    tcp: Tcp {
        recv_bytes: Counter "bytes" "Payload bytes received over TCP.",
        send_bytes: Counter "bytes" "Payload bytes sent over TCP.",
        connections: Gauge "connections" "TCP connections of mounts and others to this node now.",
        connections_limit: Gauge "connections" "Their maximum number: half of the open files this process may have, at most 65536.",
    }
    /// The origin.
    object: Object {
        get_ops: Counter "operations" "Reads of the origin.",
        get_bytes: Counter "bytes" "Bytes read from the origin.",
        get_us: Counter "microseconds" "Time spent on reads of the origin, summed.",
        put_ops: Counter "operations" "Objects and parts written to the origin.",
        put_bytes: Counter "bytes" "Bytes written to the origin.",
        uploads: Gauge "uploads" "Uploads in parts under way: files being written that are longer than a part.",
        conflicts: Counter "operations" "Changes that were refused because another writer had changed the object.",
        list_ops: Counter "operations" "Listings and heads of the origin.",
        errors: Counter "operations" "Requests to the origin that failed finally.",
        retries: Counter "operations" "Requests to the origin sent again.",
        throttled: Counter "operations" "Answers of the origin that throttled requests.",
        in_flight: Gauge "operations" "Requests to the origin in flight.",
        refused_buckets: Gauge "buckets" "Buckets whose store refuses all requests of this process now: its credentials were revoked, rotated, or lost their rights.",
    }
    /// Connections accepted and refused.
    trust: Trust {
        proved: Counter "connections" "Connections that proved the group token, to this process or by it.",
        refused_proof: Counter "connections" "Connections refused for a missing or wrong proof of the group token.",
        refused_tls: Counter "connections" "Connections with which TLS could not be agreed on.",
        refused_frames: Counter "connections" "Connections closed for protocol violations.",
        refused_silent: Counter "connections" "Connections closed because no whole request came in time.",
        refused_limit: Counter "connections" "Connections closed because there were too many.",
        idle_closed: Counter "connections" "Connections that had been idle for longest, closed to make room for others.",
    }
    /// The cache group this process belongs to, follows or coordinates.
    group: Group {
        members: Gauge "nodes" "Nodes of the group; of a coordinator, of all its groups.",
        members_away: Gauge "nodes" "Those of them that left the registry and keep their share.",
        weight: Gauge "shares" "This node's share of the group's blocks.",
        changes: Counter "operations" "Times the members changed.",
        registry_lost_seconds: Gauge "seconds" "Time since the registry stopped answering; 0 while it answers.",
        registry_losses: Counter "operations" "Times the registry stopped answering.",
        unlisted_seconds: Gauge "seconds" "Time since this node could not be registered; 0 while it is registered.",
        refused: Counter "operations" "Registrations refused: the name belongs to another process, or a limit is reached.",
        watchers: Gauge "processes" "Processes that follow the members through this coordinator.",
    }
    /// Work on many files: load and free.
    jobs: Jobs {
        running: Gauge "jobs" "Jobs that this process works on.",
        succeeded: Gauge "jobs" "Jobs of this process that completed all their files, as long as they are remembered.",
        failed: Gauge "jobs" "Jobs of this process that failed, or were stopped, as long as they are remembered.",
        files_total: Gauge "files" "Files of the running jobs, as far as known.",
        files_done: Gauge "files" "Files of the running jobs that are done.",
        files_failed: Gauge "files" "Files of the running jobs that could not be done.",
        bytes_total: Gauge "bytes" "Bytes of the running jobs' files, as far as known.",
        bytes_done: Gauge "bytes" "Bytes of the running jobs' files that were processed.",
    }
}

impl Stats {
    /// A JSON object of absolute values, a section a key.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Reads the counters that [`Stats::to_json`] gave.
    ///
    /// # Errors
    /// When the values are no counters.
    pub fn from_json(document: &serde_json::Value) -> crate::Result<Stats> {
        Stats::deserialize(document)
            .map_err(|error| Error::new(ErrorKind::Protocol, format!("the counters are malformed: {error}")))
    }

    /// The Prometheus text exposition format (version 0.0.4).
    pub fn to_prometheus(&self) -> String {
        let mut out = String::with_capacity(8192);
        self.for_each(|info, value| {
            let (suffix, kind) = match info.kind {
                MetricKind::Counter => ("_total", "counter"),
                MetricKind::Gauge => ("", "gauge"),
            };
            let name = format!("spurline_{}_{}{suffix}", info.section, info.name);
            let _ =
                writeln!(out, "# HELP {name} {} Unit: {}.\n# TYPE {name} {kind}\n{name} {value}", info.help, info.unit);
        });
        self.paths.to_prometheus(&mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_and_values_agree() {
        let stats = Stats::default();
        stats.fuse.read_bytes.add(7);
        stats.tcp.recv_bytes.add(9);
        let json = stats.to_json();
        assert_eq!(json["fuse"]["read_bytes"], 7);
        assert_eq!(json["tcp"]["recv_bytes"], 9);
        let mut seen = 0;
        stats.for_each(|info, _| {
            assert!(info.help.ends_with('.'), "{}", info.name);
            seen += 1;
        });
        assert_eq!(seen, METRICS.len());
        assert!(stats.to_prometheus().contains("\nspurline_fuse_read_bytes_total 7\n"));
    }
}
