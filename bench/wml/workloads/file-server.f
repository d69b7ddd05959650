# Row 43: users who make, extend, read, look at and remove files.

set $dir=/tmp
set $nfiles=200000
set $filesize=128k
set $dirwidth=20
set $nthreads=50
set $iosize=1m
set $appendsize=16k
set $ops=3000000

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
    flowop finishoncount name=finish,value=$ops
  }
}

create files
psrun -10
