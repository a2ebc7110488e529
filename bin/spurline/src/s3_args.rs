//! The flags of the S3 endpoint and of `gateway`, and their conversion to raw settings. It checks single values only.

use crate::args::{BucketWriteArgs, CacheArgs, CommonArgs, GroupArgs, LogArgs, NetArgs, OriginArgs, TrustArgs};
use clap::Args;
use spurline_config::values::{parse_listen_address, parse_squash};
use spurline_config::{RawGateway, RawS3, RawVolume, ReplicaCounts, SourceUrl};
use spurline_types::parse_duration;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The arguments of `gateway`.
#[derive(Debug, Clone, Args)]
pub struct GatewayArgs {
    /// Source to serve: s3://BUCKET[/PREFIX], gs://…, az://…, file:///DIR or a plain path
    #[arg(value_name = "SOURCE")]
    pub source: SourceUrl,
    /// The endpoint.
    #[command(flatten)]
    pub s3: S3Args,
    /// Take changes of the source: a directory or an S3 bucket
    #[arg(long, help_heading = "S3")]
    pub writable: bool,
    /// Make all changes as this user and group, in place of those of this process
    #[arg(long, value_name = "UID:GID", value_parser = parse_squash, help_heading = "S3")]
    pub squash: Option<(u32, u32)>,
    /// How a bucket is changed.
    #[command(flatten)]
    pub bucket: BucketWriteArgs,
    /// Config file, the common flags.
    #[command(flatten)]
    pub common: CommonArgs,
    /// The cache group.
    #[command(flatten)]
    pub group: GroupArgs,
    /// Number of nodes that hold each file, with exceptions for some paths: N[,PATH=N]
    #[arg(long, value_name = "N[,PATH=N]", default_value = "1", help_heading = "Group")]
    pub replicas: ReplicaCounts,
    /// Send a slow read to a second node too, after this time at the earliest; 0 disables it
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = parse_duration, help_heading = "Group")]
    pub hedge_after: Duration,
    /// The network.
    #[command(flatten)]
    pub net: NetArgs,
    /// Authentication and encryption.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// The cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// The origin.
    #[command(flatten)]
    pub under: OriginArgs,
    /// Logs and metrics.
    #[command(flatten)]
    pub log: LogArgs,
    /// Run in the background once the gateway serves
    #[arg(short = 'd', long, help_heading = "S3", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "S3")]
    pub foreground: bool,
}

/// Flags of the S3 endpoint.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "S3")]
pub struct S3Args {
    /// Serve S3 clients at this address and port: 127.0.0.1:9000, [::]:9000
    ///
    /// Without --s3-keys only at a loopback address, where every user of this host may read and change what the process may.
    #[arg(long, value_name = "ADDR", value_parser = parse_listen_address)]
    pub s3_listen: Option<SocketAddr>,
    /// File with the keys of clients: a line ACCESS_KEY:SECRET for each, readable by its owner only (chmod 600)
    ///
    /// Requests are signed with them (AWS Signature Version 4, in headers or in the URL); others are refused. Each key has all rights.
    /// The file is read again when it changes.
    #[arg(long, value_name = "FILE")]
    pub s3_keys: Option<PathBuf>,
    /// Name of the bucket: NAME, or NAME=SOURCE for each of several sources [default: the last folder of the source, or
    /// its bucket]
    #[arg(long, value_name = "NAME[=SOURCE]")]
    pub s3_bucket: Vec<String>,
    /// Buckets are also hosts below this name: BUCKET.NAME
    #[arg(long, value_name = "NAME")]
    pub s3_domain: Option<String>,
    /// Certificate of the endpoint in PEM, with its chain: clients use https:// then
    ///
    /// The files are read again when they change.
    #[arg(long, value_name = "FILE", requires = "s3_tls_key")]
    pub s3_tls_cert: Option<PathBuf>,
    /// Private key of that certificate in PEM
    #[arg(long, value_name = "FILE", requires = "s3_tls_cert")]
    pub s3_tls_key: Option<PathBuf>,
    /// Directory for the bytes of uploads until they are in the source [default: the first cache directory, or that of
    /// temporary files]
    #[arg(long, value_name = "DIR")]
    pub s3_upload_dir: Option<PathBuf>,
}

impl From<S3Args> for RawS3 {
    fn from(args: S3Args) -> Self {
        let S3Args { s3_listen, s3_keys, s3_bucket, s3_domain, s3_tls_cert, s3_tls_key, s3_upload_dir } = args;
        RawS3 { s3_listen, s3_keys, s3_bucket, s3_domain, s3_tls_cert, s3_tls_key, s3_upload_dir }
    }
}

impl From<GatewayArgs> for RawGateway {
    fn from(args: GatewayArgs) -> Self {
        RawGateway {
            volume: RawVolume {
                source: args.source,
                group: args.group.into(),
                replicas: args.replicas,
                hedge_after: args.hedge_after,
                net: args.net.into(),
                trust: args.trust.into(),
                cache: args.cache.into(),
                under: args.under.into(),
                buffer_size: args.common.buffer_size,
            },
            writable: args.writable,
            squash: args.squash,
            bucket: args.bucket.into(),
            s3: args.s3.into(),
            log: args.log.into(),
            background: args.background,
        }
    }
}
