//! Keys with limits, and what S3 says of signatures and digests that are wrong, by boto3.

use crate::rig::*;
use spurline_rig::s3_clients::*;
use spurline_rig::world::*;
use std::fs;

const SECRET: &str = "0123456789abcdef0123";

/// Calls of clients with other rights. `HEAD` has no document, and so no code.
const BY_LIMITED_CLIENTS: &str = r#"
import boto3, os, sys
from botocore.exceptions import ClientError
def client(key):
    return boto3.client('s3', aws_access_key_id=key, aws_secret_access_key=os.environ['AWS_SECRET_ACCESS_KEY'])
def refuse(call, **words):
    try:
        call(**{'Bucket': 'data', **words})
        sys.exit(f'{call} was not refused: {words}')
    except ClientError as error:
        assert error.response['Error']['Code'] in ['AccessDenied', '403'], error
def names(found):
    return [item['Key'] for item in found.get('Contents', [])]
whole, reader, below, reader_below, elsewhere = map(client, ['whole', 'reader', 'below', 'reader-below', 'elsewhere'])
for key in ['train/a', 'train/d/b', 'test/c', 'trained']:
    whole.put_object(Bucket='data', Key=key, Body=key.encode())
copied = {'Bucket': 'data', 'Key': 'test/c'}

assert names(reader.list_objects_v2(Bucket='data')) == ['test/c', 'train/a', 'train/d/b', 'trained']
assert reader.get_object(Bucket='data', Key='test/c')['Body'].read() == b'test/c'
below.put_object(Bucket='data', Key='train/new', Body=b'new')
for one in [below, reader_below]:
    assert names(one.list_objects_v2(Bucket='data', Prefix='train/')) == ['train/a', 'train/d/b', 'train/new']
    assert names(one.list_objects(Bucket='data', Prefix='train/d')) == ['train/d/b']
    assert one.get_object(Bucket='data', Key='train/a', Range='bytes=6-')['Body'].read() == b'a'
    assert [bucket['Name'] for bucket in one.list_buckets()['Buckets']] == ['data']
    one.head_bucket(Bucket='data')
    for key in ['test/c', 'trained', 'absent']:
        refuse(one.get_object, Key=key)
        refuse(one.get_object, Key=key, Range='no range')
        refuse(one.head_object, Key=key)
        refuse(one.get_object_tagging, Key=key)
        refuse(one.put_object, Key=key, Body=b'x')
        refuse(one.put_object, Key=key, Body=b'x', Expires='Sunday, 06-Nov-94 08:49:37 GMT')
        refuse(one.delete_object, Key=key)
        refuse(one.create_multipart_upload, Key=key)
    for prefix in ['', 'train', 'test/']:
        refuse(one.list_objects_v2, Prefix=prefix)
        refuse(one.list_objects, Prefix=prefix)
        refuse(one.list_multipart_uploads, Prefix=prefix)
    refuse(one.copy_object, Key='train/copy', CopySource=copied)
whole.copy_object(Bucket='data', Key='train/copy', CopySource=copied)
for one in [reader, reader_below]:
    refuse(one.put_object, Key='train/a', Body=b'x')
    refuse(one.delete_object, Key='train/a')
    refuse(one.delete_objects, Delete={'Objects': [{'Key': 'train/a'}]})
    refuse(one.copy_object, Key='train/a', CopySource={'Bucket': 'data', 'Key': 'train/d/b'})
    refuse(one.create_multipart_upload, Key='train/a')
upload = {'Bucket': 'data', 'Key': 'test/parts', 'UploadId': whole.create_multipart_upload(Bucket='data', Key='test/parts')['UploadId']}
for one in [reader, below]:
    refuse(one.upload_part, PartNumber=1, Body=b'x', **upload)
    refuse(one.upload_part_copy, PartNumber=1, CopySource=copied, **upload)
    refuse(one.complete_multipart_upload, MultipartUpload={'Parts': [{'PartNumber': 1, 'ETag': 'x'}]}, **upload)
    refuse(one.abort_multipart_upload, **upload)
refuse(below.list_parts, **upload)
assert 'Parts' not in reader.list_parts(**upload)
whole.abort_multipart_upload(**upload)
removed = below.delete_objects(Bucket='data', Delete={'Objects': [{'Key': 'train/a'}, {'Key': 'test/c'}]})
assert [item['Key'] for item in removed['Deleted']] == ['train/a'], removed
assert [(item['Key'], item['Code']) for item in removed['Errors']] == [('test/c', 'AccessDenied')], removed
assert elsewhere.list_buckets()['Buckets'] == []
refuse(elsewhere.head_bucket)
refuse(elsewhere.get_object, Key='train/d/b')
refuse(elsewhere.list_objects_v2)
"#;

/// Requests whose signature is right, and other parts are not; the code of each error.
const BY_ODD_REQUESTS: &str = r#"
import boto3, hashlib, urllib.request, urllib.error
from botocore.config import Config
s3 = boto3.client('s3', config=Config(signature_version='s3v4'))
def code_of(url, **words):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, **words)).status
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, text.split('<Code>')[1].split('</Code>')[0]
def signed(call, expires=60):
    return s3.generate_presigned_url(call, Params={'Bucket': 'data', 'Key': 'x'}, ExpiresIn=expires)
put = signed('put_object')
digest = lambda text: {'x-amz-content-sha256': hashlib.sha256(text).hexdigest()}
assert code_of(put, data=b'right', method='PUT', headers=digest(b'right')) == 200
assert code_of(put, data=b'other', method='PUT', headers=digest(b'right')) == (400, 'XAmzContentSHA256Mismatch')
assert code_of(put, data=b'other', method='PUT', headers={'Content-MD5': 'none'}) == (400, 'InvalidDigest')
assert s3.get_object(Bucket='data', Key='x')['Body'].read() == b'right'
assert code_of(signed('get_object', 604800)) == 200
assert code_of(signed('get_object', 604801)) == (400, 'AuthorizationQueryParametersError')
s3.put_object(Bucket='data', Key='x', Body=b'right', Metadata={'note': 'two  and   three'})
assert s3.head_object(Bucket='data', Key='x')['Metadata'] == {'note': 'two  and   three'}
"#;

fn run_boto3(world: &World, keys: &str, id: &str, script: &str) {
    let Some(bin) = s3_clients() else { return };
    let data = world.dir("data");
    let at = Endpoint::gateway_with_keys(world, data.to_str().unwrap(), keys);
    let mut python = s3_client(&bin.join("python"), &at.url(), ClientKeys { id, secret: SECRET });
    succeed(python.args(["-c", script]));
}

#[test]
fn keys_can_be_limited_to_reads_and_to_a_prefix() {
    let world = World::new();
    let keys = format!(
        "whole:{SECRET}\nreader:{SECRET}:ro\nbelow:{SECRET}:train/\nreader-below:{SECRET}:ro:s3://data/train/\n\
         elsewhere:{SECRET}:s3://other\n"
    );
    run_boto3(&world, &keys, "whole", BY_LIMITED_CLIENTS);
}

#[test]
fn wrong_digests_and_signatures_have_the_codes_of_s3() {
    let world = World::new();
    run_boto3(&world, &format!("client:{SECRET}\n"), "client", BY_ODD_REQUESTS);
}

#[test]
fn a_wrong_limit_is_named() {
    let world = World::new();
    let data = world.dir("data");
    for (limit, why) in [(":/train", "begins with a slash"), (":ro:", "is empty"), (":s3:///train", "names no bucket")]
    {
        let keys = key_file(&world, &format!("client:{SECRET}{limit}\n"));
        let words = ["gateway", data.to_str().unwrap(), "--s3-listen", "127.0.0.1:0", "--s3-keys"];
        refused(&world.run(&[&words[..], &[keys.to_str().unwrap()]].concat()), 2, &["line 1", why, "[:ro][:PREFIX]"]);
    }
    assert_eq!(fs::read_dir(data).unwrap().count(), 0);
}
