# A file server with the default sizes of Filebench's personality: users who
# make, extend, read, look at and remove files.

set $dir=/tmp
set $nfiles=10000
set $filesize=cvar(type=cvar-gamma,parameters=mean:131072;gamma:1.5)
set $dirwidth=20
set $nthreads=50
set $iosize=1m
set $appendsize=16k
set $seconds=60

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$dirwidth,prealloc=80

define process name=server,instances=1
{
  thread name=user,memsize=10m,instances=$nthreads
  {
    flowop createfile name=create,filesetname=data,fd=1
    flowop writewholefile name=write,srcfd=1,fd=1,iosize=$iosize
    flowop closefile name=close-written,fd=1
    flowop openfile name=open-to-append,filesetname=data,fd=1
    flowop appendfilerand name=append,iosize=$appendsize,fd=1
    flowop closefile name=close-appended,fd=1
    flowop openfile name=open-to-read,filesetname=data,fd=1
    flowop readwholefile name=read,fd=1,iosize=$iosize
    flowop closefile name=close-read,fd=1
    flowop deletefile name=delete,filesetname=data
    flowop statfile name=stat,filesetname=data
  }
}

create files
run $seconds
