//! S3 clients of others: boto3, the AWS command line, rclone, s3fs and obstore read and write objects with keys, which are files of
//! a directory.

use crate::rig::*;
use crate::s3_clients::*;
use crate::world::*;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;

const KEY: &str = "client";
const SECRET: &str = "0123456789abcdef0123";

/// Calls of boto3: signatures in headers, in URLs and in bodies, parts, checksums, pages.
const BY_BOTO3: &str = r#"
import boto3, io, os, sys, urllib.request, urllib.error
from botocore.config import Config
from botocore.exceptions import ClientError
s3 = boto3.client('s3', config=Config(retries={'total_max_attempts': 1}, signature_version='s3v4'))
assert [b['Name'] for b in s3.list_buckets()['Buckets']] == ['data']
big = os.urandom(11 << 20)
s3.put_object(Bucket='data', Key='d/small', Body=b'small', Metadata={'note': 'lost'})
s3.upload_fileobj(io.BytesIO(big), 'data', 'd/big')
assert s3.get_object(Bucket='data', Key='d/big')['Body'].read() == big
assert s3.get_object(Bucket='data', Key='d/big', Range='bytes=5-9')['Body'].read() == big[5:10]
for algorithm in ['CRC32', 'CRC32C', 'CRC64NVME', 'SHA1', 'SHA256']:
    try:
        s3.put_object(Bucket='data', Key='sums/' + algorithm, Body=big[:70000], ChecksumAlgorithm=algorithm)
    except Exception as error:
        # Some need a library of their own.
        assert '[crt]' in str(error), error
keys = [o['Key'] for p in s3.get_paginator('list_objects_v2').paginate(Bucket='data', PaginationConfig={'PageSize': 1}) for o in p.get('Contents', [])]
assert keys == sorted(keys) and {'d/big', 'd/small', 'sums/CRC32'} <= set(keys), keys
url = s3.generate_presigned_url('get_object', Params={'Bucket': 'data', 'Key': 'd/small'}, ExpiresIn=60)
assert urllib.request.urlopen(url).read() == b'small'
put = s3.generate_presigned_url('put_object', Params={'Bucket': 'data', 'Key': 'd/by url'}, ExpiresIn=60)
urllib.request.urlopen(urllib.request.Request(put, data=b'by url', method='PUT'))
assert s3.get_object(Bucket='data', Key='d/by url')['Body'].read() == b'by url'
for wrong in [url.replace('d/small', 'd/big'), url[:-1] + ('0' if url[-1] != '0' else '1')]:
    try:
        urllib.request.urlopen(wrong)
        sys.exit('a wrong signature was accepted: ' + wrong)
    except urllib.error.HTTPError as error:
        assert error.code == 403, error
s3.copy_object(Bucket='data', Key='d/copy', CopySource={'Bucket': 'data', 'Key': 'd/small'})
s3.copy({'Bucket': 'data', 'Key': 'd/big'}, 'data', 'd/big copy')
assert s3.get_object(Bucket='data', Key='d/big copy')['Body'].read() == big
try:
    s3.put_object(Bucket='data', Key='d/small', Body=b'x', IfNoneMatch='*')
    sys.exit('an object was replaced')
except ClientError as error:
    assert error.response['Error']['Code'] == 'PreconditionFailed', error
try:
    s3.get_object_tagging(Bucket='data', Key='d/small')
    sys.exit('there are no tags')
except ClientError as error:
    assert error.response['ResponseMetadata']['HTTPStatusCode'] == 501, error
s3.delete_objects(Bucket='data', Delete={'Objects': [{'Key': k} for k in ['d/copy', 'd/big copy', 'd/by url']]})
for secret in ['0' * 20, '']:
    other = boto3.client('s3', aws_access_key_id='client', aws_secret_access_key=secret or '1' * 20)
    try:
        other.list_objects_v2(Bucket='data')
        sys.exit('a wrong secret was accepted')
    except ClientError as error:
        assert error.response['Error']['Code'] == 'SignatureDoesNotMatch', error
try:
    boto3.client('s3', aws_access_key_id='stranger', aws_secret_access_key='1' * 20).list_objects_v2(Bucket='data')
    sys.exit('a wrong key was accepted')
except ClientError as error:
    assert error.response['Error']['Code'] == 'InvalidAccessKeyId', error
"#;

/// Calls of s3fs and obstore.
const BY_LIBRARIES: &str = r#"
import os, s3fs, obstore
from obstore.store import S3Store
endpoint = os.environ['AWS_ENDPOINT_URL']
files = s3fs.S3FileSystem(endpoint_url=endpoint)
assert files.ls('data') == ['data/d', 'data/sums'], files.ls('data')
big = files.cat('data/d/big')
with files.open('data/by-s3fs/one', 'wb') as f:
    f.write(big)
assert files.cat_ranges(['data/d/big', 'data/by-s3fs/one'], [3, 7], [9, 11]) == [big[3:9], big[7:11]]
files.mv('data/by-s3fs/one', 'data/by-s3fs/two')
assert files.find('data/by-s3fs') == ['data/by-s3fs/two']
store = S3Store('data', endpoint=endpoint, client_options={'allow_http': True}, virtual_hosted_style_request=False)
obstore.put(store, 'by-obstore/one', big)
assert bytes(obstore.get(store, 'by-obstore/one').bytes()) == big
assert [bytes(r) for r in obstore.get_ranges(store, 'd/big', starts=[1, 100], ends=[5, 200])] == [big[1:5], big[100:200]]
assert [o['path'] for page in obstore.list(store, prefix='by-obstore') for o in page] == ['by-obstore/one']
obstore.copy(store, 'by-obstore/one', 'by-obstore/two')
obstore.delete(store, 'by-obstore/one')
files.rm('data/by-s3fs', recursive=True)
"#;

/// Uploads of boto3 to an endpoint without keys, over TLS: the bodies are in chunks, with a checksum behind.
const BY_BOTO3_WITHOUT_KEYS: &str = r#"
import boto3, io, os
sent = []
s3 = boto3.client('s3', verify=os.environ['CERT'])
s3.meta.events.register('before-send.s3', lambda request, **_: sent.append(request.headers.get('Content-Encoding')))
big = os.urandom(9 << 20)
s3.put_object(Bucket='data', Key='small', Body=b'small')
s3.upload_fileobj(io.BytesIO(big), 'data', 'big')
assert b'aws-chunked' in sent, sent
assert s3.get_object(Bucket='data', Key='small')['Body'].read() == b'small'
assert s3.get_object(Bucket='data', Key='big')['Body'].read() == big
"#;

#[test]
fn clients_with_any_keys_write_where_the_endpoint_has_none() {
    let Some(bin) = s3_clients() else { return };
    let world = World::new();
    let data = world.dir("data");
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let cert = world.file("cert.pem", certified.cert.pem().as_bytes());
    let key = world.file("key.pem", certified.signing_key.serialize_pem().as_bytes());
    let words = ["--writable", "--s3-tls-cert", cert.to_str().unwrap(), "--s3-tls-key", key.to_str().unwrap()];
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &words);
    let url = format!("https://{}", at.address);
    let keys = || ClientKeys { id: "any", secret: "any" };
    succeed(s3_client(&bin.join("python"), &url, keys()).env("CERT", &cert).args(["-c", BY_BOTO3_WITHOUT_KEYS]));
    assert_eq!(fs::read(data.join("small")).unwrap(), b"small");
    let aws = || {
        let mut command = s3_client(&bin.join("aws"), &url, keys());
        command.env("AWS_CA_BUNDLE", &cert).args(["s3", "cp", "--quiet"]);
        command
    };
    succeed(aws().arg(data.join("big")).arg("s3://data/by-aws"));
    assert!(fs::read(data.join("by-aws")).unwrap() == fs::read(data.join("big")).unwrap());
    let local = world.path("local");
    succeed(aws().arg("s3://data/by-aws").arg(&local));
    assert!(fs::read(local).unwrap() == fs::read(data.join("big")).unwrap());
}

#[test]
fn clients_of_others_read_and_write() {
    let (Some(bin), Some(libraries)) = (s3_clients(), s3_libraries()) else { return };
    let world = World::new();
    let data = world.dir("data");
    let keys = world.file("keys", format!("{KEY}:{SECRET}\n").as_bytes());
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o600)).unwrap();
    let flags = ["--writable", "--s3-keys", keys.to_str().unwrap()];
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &flags);
    let endpoint = at.url();
    let client = |program: &str| s3_client(&bin.join(program), &endpoint, ClientKeys { id: KEY, secret: SECRET });
    succeed(client("python").args(["-c", BY_BOTO3]));
    let big = fs::read(data.join("d/big")).unwrap();
    assert_eq!(fs::read(data.join("d/small")).unwrap(), b"small");
    assert!(!data.join("d/copy").exists());

    let local = world.dir("local");
    succeed(client("aws").args(["s3", "cp", "--quiet", "s3://data/d/big"]).arg(local.join("big")));
    assert!(fs::read(local.join("big")).unwrap() == big);
    succeed(client("aws").args(["s3", "sync", "--quiet"]).arg(&local).arg("s3://data/by-aws"));
    assert!(fs::read(data.join("by-aws/big")).unwrap() == big);
    let listed = succeed(client("aws").args(["s3", "ls", "s3://data/"]));
    assert!(listed.contains("PRE by-aws/") && listed.contains("PRE d/"), "{listed}");
    succeed(client("aws").args(["s3", "rm", "--quiet", "--recursive", "s3://data/by-aws"]));
    assert!(!data.join("by-aws").exists());

    succeed(client("rclone").args(["copyto"]).arg(local.join("big")).arg("s:data/by-rclone/big"));
    succeed(client("rclone").args(["check", "--download"]).arg(&local).arg("s:data/by-rclone"));
    succeed(client("rclone").args(["purge", "s:data/by-rclone"]));
    assert!(!data.join("by-rclone").exists());

    let python = libraries.join("python");
    succeed(s3_client(&python, &endpoint, ClientKeys { id: KEY, secret: SECRET }).args(["-c", BY_LIBRARIES]));
    assert!(fs::read(data.join("by-obstore/two")).unwrap() == big);
    assert!(!data.join("by-s3fs").exists() && !data.join("by-obstore/one").exists());
}
